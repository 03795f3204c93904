"""Report of an engine as text, as JSON for programs, and as a page."""

import html
import json
from collections.abc import Iterator

from jaxpaged.research.verify.engines.contract import VERSION
from jaxpaged.research.verify.engines.judge import REPEATS, EngineReport, Finding
from jaxpaged.research.verify.engines.properties import RULES

WAYS = {
    "reset": "alone after a reset",
    "salt": "alone under a salt of one use",
    "reference": "of the reference engine",
    "first": "as first asked: the engine serves neither reset nor salts, so warm answers are compared "
    "with warm ones",
}


def text(report: EngineReport) -> str:
    """Return the report as text."""
    return "\n".join(_lines(report))


def _lines(report: EngineReport) -> Iterator[str]:
    verdict = "passed" if report.ok else "FAILED" if report.findings else "nothing was verified"
    yield (
        f"{report.name}: {verdict}, contract {VERSION}, {report.num_histories} histories in "
        f"{report.seconds:.1f} s, seed {report.seed}"
    )
    yield f"cold answers: {WAYS[report.way]}"
    yield (
        f"log-probabilities: within {report.terms.tolerance:g}; the largest difference that passed is "
        f"{report.seen.worst:.3g}; {report.seen.ties} answers were compared up to a near tie"
    )
    failed = {finding.name for finding in report.findings}
    for name in RULES:
        number = report.seen.checks.get(name, 0)
        state = "FAILED" if name in failed else "holds" if number else "not checked"
        yield f"  {name:<12} {state:<11} {number} checks"
    for what, why in report.not_served.items():
        yield f"not served: {what}: {why}"
    for finding in report.findings:
        yield from _finding(finding)


def _finding(finding: Finding) -> Iterator[str]:
    yield f"\n{finding.name} FAILED: {finding.what}"
    yield f"rule: {finding.rule}"
    yield (
        f"found in {finding.seconds:.1f} s by the family {finding.family}, history {finding.seed}; the short "
        f"history failed again {finding.reproduced} of {REPEATS} times:"
    )
    yield from (f"  {i}. {line}" for i, line in enumerate(finding.history, 1))


def as_json(report: EngineReport) -> str:
    """Return the report as JSON."""
    return json.dumps(
        {
            "contract": VERSION,
            "engine": report.name,
            "ok": report.ok,
            "seed": report.seed,
            "histories": report.num_histories,
            "seconds": round(report.seconds, 3),
            "cold_answers": report.way,
            "tolerance": report.terms.tolerance,
            "largest_difference": report.seen.worst,
            "near_ties": report.seen.ties,
            "checks": {name: report.seen.checks.get(name, 0) for name in RULES},
            "not_served": report.not_served,
            "findings": [vars(finding) | {"history": list(finding.history)} for finding in report.findings],
        },
        indent=1,
    )


STYLE = (
    "body{font:16px sans-serif;max-width:60em;margin:2em auto}"
    "td,th{padding:.2em .8em;text-align:left}.bad{color:#b00}"
)


def page(report: EngineReport) -> str:
    """Return the report as a page of HTML that needs nothing else."""
    failed = {finding.name for finding in report.findings}
    lines = []
    for name, rule in RULES.items():
        number = report.seen.checks.get(name, 0)
        state = "<b class=bad>failed</b>" if name in failed else "holds" if number else "not checked"
        lines.append(f"<tr><td>{name}<td>{state}<td>{number}<td>{html.escape(rule)}")
    head = [html.escape(line) for line in list(_lines(report))[:3]]
    findings = [f"<pre>{html.escape(chr(10).join(_finding(each)).strip())}</pre>" for each in report.findings]
    missing = [f"<li>{html.escape(f'{what}: {why}')}" for what, why in report.not_served.items()]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(report.name)}</title>"
        f"<style>{STYLE}</style><h1>{head[0]}</h1><p>{head[1]}<p>{head[2]}"
        f"<table><tr><th>property<th>verdict<th>checks<th>rule{''.join(lines)}</table>"
        f"{''.join(findings)}<h2>Not served</h2><ul>{''.join(missing) or '<li>nothing'}</ul></html>\n"
    )

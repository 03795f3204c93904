"""Our own server before the judge of engines: every property that is checked holds."""

import pytest

from jaxpaged.research.verify.engines import report
from jaxpaged.research.verify.engines.judge import verify_engine
from jaxpaged.research.verify.engines.server import Facts, ServerAdapter

FAMILIES = (
    *("warm", "partly warm", "conversation", "company", "crowd"),
    *("pressure", "aborts", "salts", "options", "mixed"),
)


@pytest.mark.nightly
def test_our_server_holds_before_the_judge(served):
    adapter = ServerAdapter(served.url, Facts(token_ids=(3, 90), block_size=8, num_blocks=15))
    try:
        found = verify_engine(adapter, seconds=20.0, tolerance=0.0, families=FAMILIES)
    finally:
        adapter.close()
    assert found.ok, report.text(found)
    assert found.way == "salt"
    checked = ("reuse", "partition", "hits", "accounting", "lifetime")
    assert all(found.seen.checks.get(name) for name in checked), report.text(found)

"""The arrows between the parts point one way."""

import ast
import functools
import importlib.metadata
import re
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

KV_EVENTS_OPTIONS = "jaxpaged/kv_events/options.py"
# What every part of the package may import: small, and without jax.
GROUND = {
    "jaxpaged/arithmetic.py",
    "jaxpaged/checks.py",
    "jaxpaged/compat.py",
    "jaxpaged/config.py",
    "jaxpaged/inputs.py",
    KV_EVENTS_OPTIONS,
    "jaxpaged/lora",
    "jaxpaged/options.py",
    "jaxpaged/sampling_lists.py",
    "jaxpaged/sampling_params.py",
    "jaxpaged/speculation.py",
    "jaxpaged/structured_outputs.py",
    "jaxpaged/status.py",
    "jaxpaged/text/limits.py",
    "jaxpaged/vllm_names",
    "jaxpaged/untrusted.py",
}
# The contracts of parts from outside, each at its level.
VERSIONS = "jaxpaged/contracts/versions.py"
ATTENTIONS = "jaxpaged/contracts/attentions.py"
SAMPLERS = "jaxpaged/contracts/samplers.py"
PROCESSORS = "jaxpaged/contracts/processors.py"
HOST_PROCESSORS = "jaxpaged/contracts/host_processors.py"
LAYER_KINDS = "jaxpaged/contracts/layer_kinds.py"
BLOCK_STORES = "jaxpaged/contracts/block_stores.py"
MEMORY = {"pallas_kernels", "jaxpaged/memory", VERSIONS, *GROUND}
MODELS = {
    "jaxpaged/models",
    "jaxpaged/digest.py",
    "jaxpaged/disk_cache.py",
    "jaxpaged/row_sums.py",
    ATTENTIONS,
    *MEMORY,
}
# The compiled part: from here on no thread and no clock.
STEP = {
    "jaxpaged/step",
    "jaxpaged/parallel",
    "jaxpaged/sampling.py",
    "jaxpaged/sampling_filters.py",
    "jaxpaged/sampling_state.py",
    SAMPLERS,
    PROCESSORS,
    HOST_PROCESSORS,
    *MODELS,
}
HANDOVER = {"jaxpaged/handover", *STEP}
TIERS = {"jaxpaged/tiers", "jaxpaged/disk_cache.py", BLOCK_STORES, "pallas_kernels", VERSIONS, *GROUND}
ENGINE = {
    "jaxpaged/engine",
    "jaxpaged/grammar",
    LAYER_KINDS,
    "jaxpaged/code_digest.py",
    "jaxpaged/kv_events",
    "jaxpaged/routing.py",
    "jaxpaged/text",
    *HANDOVER,
    *TIERS,
}
POOLING = {"jaxpaged/pooling", *ENGINE}
LEARN = {"jaxpaged/research/learn", *ENGINE}
API = {"jaxpaged/api", *LEARN, *POOLING}
# Each part, and the parts of our own that it may import.
ALLOWED = {
    "reference": set(),
    "pallas_kernels": set(),
    "jaxpaged/arithmetic.py": set(),
    "jaxpaged/row_sums.py": set(),
    "jaxpaged/text/limits.py": {"jaxpaged/checks.py"},
    "jaxpaged/checks.py": set(),
    "jaxpaged/status.py": set(),
    "jaxpaged/options.py": {"jaxpaged/checks.py"},
    "jaxpaged/config_rules.py": {"jaxpaged/checks.py", "jaxpaged/speculation.py"},
    "jaxpaged/config.py": {
        "jaxpaged/checks.py",
        "jaxpaged/compat.py",
        "jaxpaged/config_rules.py",
        KV_EVENTS_OPTIONS,
        "jaxpaged/options.py",
        "jaxpaged/sampling_params.py",
        "jaxpaged/speculation.py",
    },
    KV_EVENTS_OPTIONS: {"jaxpaged/checks.py"},
    "jaxpaged/kv_events": {"jaxpaged/routing.py", *GROUND},
    "jaxpaged/speculation.py": {"jaxpaged/checks.py", "jaxpaged/vllm_names"},
    "jaxpaged/sampling_params.py": {
        "jaxpaged/checks.py",
        "jaxpaged/compat.py",
        "jaxpaged/options.py",
        "jaxpaged/sampling_lists.py",
        "jaxpaged/structured_outputs.py",
        "jaxpaged/vllm_names",
    },
    "jaxpaged/sampling_lists.py": {"jaxpaged/checks.py"},
    "jaxpaged/structured_outputs.py": {"jaxpaged/checks.py"},
    "jaxpaged/vllm_names": {"jaxpaged/checks.py"},
    "jaxpaged/lora": {"jaxpaged/checks.py"},
    "jaxpaged/inputs.py": {"jaxpaged/checks.py", "jaxpaged/compat.py"},
    "jaxpaged/untrusted.py": {"jaxpaged/checks.py"},
    "jaxpaged/text": {"jaxpaged/checks.py", "jaxpaged/text/limits.py"},
    "jaxpaged/grammar": {"jaxpaged/disk_cache.py", "jaxpaged/text", *GROUND},
    "jaxpaged/routing.py": {"jaxpaged/checks.py"},
    "jaxpaged/sampling.py": {
        "jaxpaged/arithmetic.py",
        "jaxpaged/config.py",
        "jaxpaged/row_sums.py",
        "jaxpaged/sampling_filters.py",
        "jaxpaged/sampling_params.py",
        "jaxpaged/sampling_state.py",
    },
    "jaxpaged/sampling_filters.py": {"jaxpaged/row_sums.py", "jaxpaged/sampling_state.py"},
    "jaxpaged/sampling_state.py": {"jaxpaged/arithmetic.py", "jaxpaged/sampling_params.py"},
    "jaxpaged/disk_cache.py": {"pallas_kernels"},
    "jaxpaged/digest.py": set(),
    "jaxpaged/code_digest.py": {"jaxpaged/disk_cache.py"},
    VERSIONS: {"jaxpaged/checks.py", "pallas_kernels"},
    ATTENTIONS: {"jaxpaged/checks.py", VERSIONS, "pallas_kernels"},
    SAMPLERS: {"jaxpaged/checks.py", VERSIONS},
    PROCESSORS: {"jaxpaged/checks.py", VERSIONS, HOST_PROCESSORS},
    HOST_PROCESSORS: {"jaxpaged/checks.py"},
    LAYER_KINDS: {"jaxpaged/checks.py", VERSIONS, "jaxpaged/memory"},
    BLOCK_STORES: {"jaxpaged/checks.py", VERSIONS},
    "jaxpaged/tiers": TIERS,
    # What parts from outside import; nothing of ours does.
    "jaxpaged/contracts": {"jaxpaged/sampling.py", ATTENTIONS, SAMPLERS, PROCESSORS, BLOCK_STORES, *MEMORY},
    "jaxpaged/memory": MEMORY,
    "jaxpaged/models": MODELS,
    "jaxpaged/parallel": {"jaxpaged/models", "jaxpaged/digest.py", *GROUND},
    "jaxpaged/step": STEP,
    "jaxpaged/handover": HANDOVER,
    "jaxpaged/engine": ENGINE,
    "jaxpaged/pooling": POOLING,
    # What serves imports none of them: commands do when they run, and `LLM.learner` when it is called.
    "jaxpaged/research/__init__.py": set(),
    "jaxpaged/research/learn": LEARN,
    "jaxpaged/api": API,
    "jaxpaged/compat.py": {"jaxpaged/vllm_names"},
    "jaxpaged/__init__.py": API,
    "jaxpaged/research/replay": {"jaxpaged/__init__.py", *API},
    "jaxpaged/batch/line_files.py": {"jaxpaged/checks.py"},
    "jaxpaged/serve": {"jaxpaged/__init__.py", "jaxpaged/batch/line_files.py", *API},
    "jaxpaged/batch/prompt_files.py": {"jaxpaged/text", *GROUND},
    "jaxpaged/batch/answer_files.py": {
        "jaxpaged/batch/line_files.py",
        "jaxpaged/batch/prompt_files.py",
        *GROUND,
    },
    "jaxpaged/batch": {"jaxpaged/__init__.py", "jaxpaged/batch/prompt_files.py", "jaxpaged/serve", *API},
    "jaxpaged/research/integrations": API,
    "jaxpaged/research/lab/loop.py": MEMORY,
    "jaxpaged/research/lab": {"jaxpaged/__init__.py", "jaxpaged/research/lab/loop.py", *API},
    "jaxpaged/research/bench": {"jaxpaged/__init__.py", "jaxpaged/research/lab", *API},
    "jaxpaged/research/verify/explore": {"jaxpaged/research/verify", *STEP},
    "jaxpaged/research/verify/engines": {
        "jaxpaged/research/verify",
        "jaxpaged/kv_events",
        "jaxpaged/checks.py",
        "jaxpaged/untrusted.py",
    },
    "jaxpaged/research/verify": {"jaxpaged/research/lab/loop.py", *MEMORY},
    "jaxpaged/research/ptx": {"jaxpaged/checks.py"},
    "jaxpaged/commands": {
        "jaxpaged/__init__.py",
        "jaxpaged/batch/answer_files.py",
        "jaxpaged/batch/prompt_files.py",
        "jaxpaged/serve",
        "jaxpaged/research/bench",
        "jaxpaged/research/verify",
        "jaxpaged/research/verify/explore",
        "jaxpaged/research/verify/engines",
        "jaxpaged/research/ptx",
        "jaxpaged/research/lab",
        *API,
    },
    "jaxpaged/__main__.py": {"jaxpaged/cli.py"},
    "jaxpaged/cli.py": {"jaxpaged/__init__.py", "jaxpaged/commands", "jaxpaged/checks.py"},
}
# Packages beside the standard library; None: any that pyproject.toml names.
THIRD_PARTY = {"reference": {"numpy"}, "pallas_kernels": {"jax", "jaxtyping", "numpy"}}
# Parts whose packages an extra of another name brings; others' extras have their own.
EXTRAS = {
    "batch": "ray",
    "grammar": "structured",
    "research/integrations": "tunix",
    "kv_events": "events",
    **{f"research/{part}": part for part in ("verify", "lab", "bench")},
}
# Packages that are seldom installed, and whose distributions have other names.
DISTRIBUTIONS = {"tunix": "google-tunix", "zmq": "pyzmq"}
VERIFY = ROOT / "jaxpaged/research/verify"
PACKAGES = ("jaxpaged", "pallas_kernels", "reference")
OURS = ("jaxpaged", "pallas_kernels", "reference", "benchmarks", "tests")


@functools.cache
def parsed(file: Path) -> ast.Module:
    """Return a file's tree, which all tests share and none changes."""
    return ast.parse(file.read_text())


def files(part: str) -> list[Path]:
    """Return the files of a part, without those that are a part of their own."""
    path = ROOT / part
    if path.suffix == ".py":
        return [path]
    return [file for file in sorted(path.rglob("*.py")) if part_of(module_name(file)) == part]


def imported_modules(file: Path, *, for_types: bool = True) -> set[str]:
    """Return the dotted names of all modules that a file imports, in functions too."""
    names = set()
    for node in _nodes(parsed(file), for_types=for_types):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = file.relative_to(ROOT).parts[: -node.level] if node.level else ()
            # The oracles travel under another name, and may not know it.
            assert bool(node.level) == (file.is_relative_to(ROOT / "reference") and _is_ours(node)), file
            module = ".".join([*above, *filter(None, [node.module])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def _nodes(tree: ast.AST, *, for_types: bool) -> Iterator[ast.AST]:
    """Yield all nodes of a tree; without `for_types` not those that only type checkers read."""
    yield tree
    is_skipped = not for_types and isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING"
    for node in tree.orelse if is_skipped else ast.iter_child_nodes(tree):
        yield from _nodes(node, for_types=for_types)


def module_name(file: Path) -> str:
    """Return the dotted name under which a file is imported."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _is_ours(node: ast.ImportFrom) -> bool:
    return node.level > 0 or (node.module or "").split(".")[0] in OURS


def part_of(module: str) -> str:
    """Return the part that a module of ours, or a name in one, belongs to."""
    path = module.replace(".", "/")
    matches = [part for part in ALLOWED if (path + "/").startswith(part.removesuffix(".py") + "/")]
    return max(matches, key=len) if matches else "jaxpaged/__init__.py"


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_only_what_is_below_it(part):
    for file in files(part):
        for module in imported_modules(file):
            top = module.split(".")[0]
            if top in OURS:
                assert part_of(module) in {part, *ALLOWED[part]}, f"{file.relative_to(ROOT)} imports {module}"
            elif part in THIRD_PARTY and top not in THIRD_PARTY[part]:
                assert top in sys.stdlib_module_names, f"{file.relative_to(ROOT)} imports {module}"


def test_no_module_imports_itself_by_way_of_others():
    """Imports in functions count, imports for type checkers do not."""
    names = {module_name(file): file for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    graph = {
        name: {
            module if module in names else module.rpartition(".")[0]
            for module in imported_modules(file, for_types=False)
        }
        - {name}
        for name, file in names.items()
    }
    while leaves := {name for name, imported in graph.items() if not imported & graph.keys()}:
        graph = {name: imported for name, imported in graph.items() if name not in leaves}
    assert not graph, f"these import each other: {sorted(graph)}"


def test_every_package_that_is_imported_comes_with_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    distributions = importlib.metadata.packages_distributions()
    for file in [*files("jaxpaged"), *files("pallas_kernels")]:
        for top in {module.split(".")[0] for module in imported_modules(file)} - {*OURS}:
            if top not in sys.stdlib_module_names:
                parts = file.relative_to(ROOT).with_suffix("").parts
                part = "/".join(parts[1:3]) if parts[1] == "research" else parts[1]
                lines = [*project["dependencies"], *extras.get(EXTRAS.get(part, part), ())]
                dependencies = {re.split(r"[<>=\[]", line)[0].replace("_", "-") for line in lines}
                # What is not installed here goes by its own name.
                found = distributions.get(top, (DISTRIBUTIONS.get(top, top),))
                named = dependencies & {name.replace("_", "-") for name in found}
                assert named, f"{file.relative_to(ROOT)} imports {top}, which pyproject.toml does not name"


def test_the_oracles_travel_under_a_name_that_clashes_with_nobodys():
    """A link, which a wheel resolves: see test_wheel.py."""
    link = ROOT / "jaxpaged/research/verify/oracles"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "reference"


def test_every_file_of_the_packages_belongs_to_a_part():
    listed = {file for part in ALLOWED for file in files(part)}
    for package in ("jaxpaged", "pallas_kernels", "reference"):
        assert set((ROOT / package).rglob("*.py")) <= listed


def test_memory_has_of_the_kernels_only_what_writes_and_copies():
    """What reads K and V is attention, and the models'."""
    imported = {name for file in files("jaxpaged/memory") for name in imported_modules(file)}
    of_kernels = {name for name in imported if name.startswith("pallas_kernels")}
    layouts = {name for name in of_kernels if name.startswith("pallas_kernels.layouts.")}
    assert of_kernels - layouts == {"pallas_kernels.ops.caches"}


def test_layouts_are_known_by_name_to_their_registry_alone():
    """Where there is a list of them, a new one is forgotten."""
    registry = ROOT / "pallas_kernels/layouts/__init__.py"
    names = set(re.findall(r'^    "(\w+)": ', registry.read_text(), re.MULTILINE))
    assert len(names) >= 10
    for file in [*files("jaxpaged"), *files("pallas_kernels")]:
        constants = {
            node.value
            for node in ast.walk(parsed(file))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        # The cases of kernels that take two arrays are in either order.
        if file.parent != registry.parent and not file.is_relative_to(ROOT / "jaxpaged/research/verify"):
            assert len(constants & (names - {"token", "fp8_e4m3", "fp8_e5m2"})) <= 1, file


@pytest.mark.parametrize(("top", "module"), [("ray", "batch.ray"), ("tunix", "research.integrations.tunix")])
def test_a_package_is_imported_by_one_file_that_nothing_imports(top, module):
    only = f"jaxpaged.{module}"
    for file in [*files("jaxpaged"), *files("pallas_kernels")]:
        if module_name(file) != only:
            names = imported_modules(file)
            assert not {name for name in names if name.split(".")[0] == top}, file
            assert not {name for name in names if f"{name}.".startswith(f"{only}.")}, file


def test_the_decoder_knows_no_family():
    """Families fill in its description; it is built from that and from weights by their role."""
    knowing = {"families", "loading.py", "gguf", "eagle3.py", "mtp.py"}  # these read files
    for file in files("jaxpaged/models"):
        if not knowing & {file.name, file.parent.name}:
            named = {name for name in imported_modules(file) if name.startswith("jaxpaged.models.families")}
            assert not named, f"{file.relative_to(ROOT)} imports {named}"


def test_the_compiled_part_has_no_thread_and_no_clock():
    others = {"threading", "time", "asyncio", "queue", "socket", "subprocess", "multiprocessing"}
    for file in files("jaxpaged/step"):
        named = {name.split(".")[0] for name in imported_modules(file)} & others
        assert not named, f"{file.relative_to(ROOT)} imports {named}"


def test_jit_and_donation_are_only_in_the_loop():
    for file in sorted((ROOT / "jaxpaged").rglob("*.py")):
        uses = {node.attr for node in ast.walk(parsed(file)) if isinstance(node, ast.Attribute)} & {
            "jit",
            "pmap",
        }
        allowed = file.name in ("loop.py", "program.py") or file.is_relative_to(VERIFY)
        assert not uses or allowed, f"{file.relative_to(ROOT)} uses {uses}"


# Lines of a file from which on a reader may wish for two. What belongs together stays together all the same.
LONG = 450


@pytest.mark.filterwarnings("default::UserWarning")
def test_files_can_be_read_at_once():
    """Warn of long files, and fail for none: a limit makes files of what spills over, which nobody wants."""
    for package in OURS:
        for file in (ROOT / package).rglob("*.py"):
            if (num_lines := len(file.read_text().splitlines())) > LONG:
                warnings.warn(f"{file.relative_to(ROOT)} has {num_lines} lines", stacklevel=1)


# Classes with one subclass, and why that is no class cut into two files.
WITH_ONE_SUBCLASS = {
    "jaxpaged.contracts.host_processors.LogitsProcessor": "users' classes have it as base, as vLLM's",
    "jaxpaged.api.arg_utils._Fields": "a dataclass made at run time, of the options that there are",
    "jaxpaged.api.arg_utils.EngineArgs": "vLLM has both names, and the second takes one option more",
    "jaxpaged.api.model.LoadedModel": "LLMEngine has one, too, without what answers whole batches",
    "jaxpaged.grammar.turns.Turn": "a place among turns, which know nothing of what is compiled in them",
    "jaxpaged.memory.free_queue.FreeQueue": "a queue of its own, which the ranked one extends by an order",
    "jaxpaged.models.weights.StoredWeights": "weights of files; changed ones are found in the same way",
    "jaxpaged.research.verify.history.Disagreement": "an exception: who catches it catches the other",
    "jaxpaged.serve.schemas.UnloadAdapterRequest": "a body whose fields the other body has, too",
    "pallas_kernels.ops.checks.TiledOptions": "a TypedDict: options of one operation are those of two",
}


def subclasses() -> dict[str, set[str]]:
    """Return the classes of ours that inherit from each class of ours, by dotted names."""
    found: dict[str, set[str]] = {}
    for file in [*(ROOT / "jaxpaged").rglob("*.py"), *files("pallas_kernels")]:
        if "oracles" in file.parts:  # a link to the reference
            continue
        module, nodes = module_name(file), [*ast.walk(parsed(file))]
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        names = {node.name: f"{module}.{node.name}" for node in classes}
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for node in classes:
            for base in node.bases:
                generic = base.value if isinstance(base, ast.Subscript) else base
                head, _, rest = ast.unparse(generic).partition(".")
                dotted = ".".join(filter(None, [names.get(head, head), rest]))
                if dotted.split(".")[0] in OURS and ".oracles." not in dotted:  # which research extends
                    found.setdefault(dotted, set()).add(f"{module}.{node.name}")
    return found


def test_no_class_inherits_from_one_that_has_no_second_subclass():
    """Where there is one, a class is cut into two, and who reads it looks for the rest elsewhere."""
    alone = {base: its for base, its in subclasses().items() if len(its) == 1}
    assert alone.keys() - WITH_ONE_SUBCLASS.keys() == set(), alone
    assert WITH_ONE_SUBCLASS.keys() - alone.keys() == set(), "these have no single subclass any more"


def test_the_device_alone_assigns_its_state():
    """What changes state and parameters is in `jaxpaged/engine/device.py`."""
    for file in (ROOT / "jaxpaged/engine").rglob("*.py"):
        for node in ast.walk(parsed(file)):
            is_assigned = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
            if is_assigned and node.attr in {"_state", "params", "kept_run"} and file.name != "device.py":
                raise AssertionError(f"{file.relative_to(ROOT)}:{node.lineno} assigns {ast.unparse(node)}")


# Accesses of tests to private names of other objects. The number may only fall.
MOST_PRIVATE_ACCESSES = 45


def test_tests_reach_into_few_private_names():
    """Own attributes do not count, and neither do names of the standard library and of JAX."""
    found = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("_"):
                is_ours = ast.unparse(node.value) not in ("self", "cls", "sys", "os", "jax")
                if is_ours and node.attr not in ("_replace", "_asdict", "_fields"):
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert len(found) <= MOST_PRIVATE_ACCESSES, "\n".join(found)

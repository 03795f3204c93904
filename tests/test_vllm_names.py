"""vLLM's names at every door, by the table and by what its source distributions say."""

import json
import tarfile

import numpy as np
import pytest

from jaxpaged import LLM, BeamSearchParams, EngineArgs, InputError, SamplingParams, StructuredOutputsParams
from jaxpaged.api.arg_utils import OF_LLM
from jaxpaged.api.model import engine_config
from jaxpaged.api.vllm_helpers import KVTransferConfig
from jaxpaged.batch.prompt_files import for_llm, of_row
from jaxpaged.cli import parser
from jaxpaged.config import EngineConfig
from jaxpaged.serve import pooling_schemas, schemas
from jaxpaged.vllm_names import make
from jaxpaged.vllm_names.flags import without_vllms
from jaxpaged.vllm_names.judge import known_names
from jaxpaged.vllm_names.options import RENAMED
from jaxpaged.vllm_names.options import defaults as engine_defaults
from jaxpaged.vllm_names.table import BEAM, ENGINE, REQUEST, SERVER

NAMES = known_names()["names"]
# What we serve of `LLM`'s options.
ENGINE_SERVED = {*EngineConfig.__dataclass_fields__, *OF_LLM, *RENAMED}
BODIES = {
    "ChatCompletionRequest": (schemas.ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "CompletionRequest": (schemas.CompletionRequest, {"prompt": "a"}),
    "ResponsesRequest": (schemas.ResponsesRequest, {"input": "a"}),
    "StreamOptions": (schemas.StreamOptions, {}),
    "TokenizeRequest": (schemas.TokenizeRequest, {"prompt": "a"}),
    "DetokenizeRequest": (schemas.DetokenizeRequest, {"tokens": [1]}),
    "LoadLoRAAdapterRequest": (schemas.LoadAdapterRequest, {"lora_name": "a", "lora_path": "b"}),
    "UnloadLoRAAdapterRequest": (schemas.UnloadAdapterRequest, {"lora_name": "a"}),
    "EmbeddingRequest": (pooling_schemas.EmbeddingRequest, {"input": "a"}),
    "PoolingRequest": (pooling_schemas.EmbeddingRequest, {"input": "a"}),
    "ClassificationRequest": (pooling_schemas.ClassificationRequest, {"input": "a"}),
    "ScoreRequest": (pooling_schemas.ScoreRequest, {"text_1": "a", "text_2": "b"}),
    "RerankRequest": (pooling_schemas.RerankRequest, {"query": "a", "documents": ["b"]}),
}


def defaults(title):
    return {name: entry["default"] for name, entry in NAMES[title].items() if "default" in entry}


def flags_of(command):
    [commands] = [action for action in parser()._actions if action.dest == "==SUPPRESS=="]
    return commands.choices[command].has_flag


def test_no_name_of_vllms_is_unknown():
    fields = {name for body, _ in BODIES.values() for name in body.model_fields}
    fields |= SamplingParams.__dataclass_fields__.keys()
    flag = flags_of("serve")
    unknown = {}
    for title, entries in NAMES.items():
        if title in ("EngineArgs", "FrontendArgs"):
            known = ENGINE_SERVED | ENGINE.keys() if title == "EngineArgs" else ENGINE.keys() | SERVER.keys()
            left = [n for n in entries if n not in known and not flag(f"--{n.replace('_', '-')}")]
        elif title == "BeamSearchParams":
            left = [n for n in entries if n not in BEAM and n not in BeamSearchParams.__dataclass_fields__]
        else:
            left = [n for n in entries if n not in REQUEST and n not in fields]
        unknown[title] = left
    assert not any(unknown.values()), unknown
    # Nor has the table names of nobody's, but those of OpenAI's and other servers'.
    assert not (ENGINE.keys() | SERVER.keys()) - NAMES["EngineArgs"].keys() - NAMES["FrontendArgs"].keys()
    assert not ENGINE.keys() & ENGINE_SERVED
    assert REQUEST.keys() - {name for title in NAMES for name in NAMES[title]} == {
        *("regex", "json_schema", "grammar", "ebnf", "prediction"),
        *("functions", "function_call", "modalities", "audio", "web_search_options"),
    }


def test_each_default_of_vllms_passes_at_its_door():
    """One by one, for an error about one of them would hide the others; and all at once."""
    engine = {n: v for n, v in defaults("EngineArgs").items() if n not in OF_LLM}
    for name, value in engine.items():
        engine_config({name: value})
    ours = engine_config(engine)
    assert ours == EngineConfig(
        gpu_memory_utilization=NAMES["EngineArgs"]["gpu_memory_utilization"]["default"]
    )
    assert engine_config(engine_defaults()) == engine_config({"enable_sleep_mode": True}) == EngineConfig()
    sampling = defaults("SamplingParams")
    for name, value in sampling.items():
        assert SamplingParams(**{name: value}) == SamplingParams.from_optional(**{name: value})
    assert SamplingParams(**sampling) == SamplingParams(**dict.fromkeys(sampling) | {"max_tokens": 16})
    beams = defaults("BeamSearchParams")
    assert BeamSearchParams(beam_width=2, max_tokens=3, **beams) == BeamSearchParams(
        beam_width=2, max_tokens=3
    )
    for title, (body, needed) in BODIES.items():
        given = defaults(title)
        for name, value in given.items():
            body.model_validate({name: value} | needed)
            body.model_validate({name: None} | needed)
        body.model_validate(given | needed)
    row = defaults("CompletionRequest") | {"stream": None, "model": None, "echo": None, "user": None}
    row = {name: row[name] for name in row if name in REQUEST or row[name] is None}
    assert of_row({**row, "prompt": "a"}, {"temperature": 0}).params == SamplingParams(temperature=0, n=1)


@pytest.mark.parametrize("command", ["generate", "serve", "info"])
def test_each_flag_of_vllms_passes_with_its_default(command):
    is_ours = flags_of(command)
    given = []
    names = NAMES["EngineArgs"] | (NAMES["FrontendArgs"] if command == "serve" else {})
    for name, entry in names.items():
        flag, value = name.replace("_", "-"), entry.get("default")
        if name in ENGINE | SERVER and not is_ours(f"--{flag}"):
            if entry["kind"] == "flag":
                given.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                values = value if isinstance(value, list) else [value]
                given += [
                    f"--{flag}",
                    *[v if isinstance(v, str) else json.dumps(v) for v in values or ["{}"]],
                ]
    assert len(given) > 300
    assert without_vllms([*given, "--seed", "3"], is_ours) == ["--seed", "3"]


def test_flags_are_taken_with_their_values_and_ours_are_left():
    is_ours = flags_of("serve")
    argv = "--max_model_len 64 -tp 1 -pp 1 -O3 --trust-remote-code m_a --no-enable-dbo "
    argv += "--compilation-config.mode 3 --structured-outputs-config.backend auto "
    argv += "--tokenizer-mode=auto --allowed-media-domains a b --host h --unknown -1 -- --nnodes 2"
    assert without_vllms(argv.split(), is_ours) == (
        ["--max-model-len", "64", "-tp", "1", "m_a", "--host", "h", "--unknown", "-1", "--", "--nnodes", "2"]
    )
    for argv, message in (
        (
            ["--nnodes", "2"],
            r"^nnodes=2, an option of vLLM's since \S+ \(several machines\), is not supported: ",
        ),
        (["-pp=2"], "^pipeline_parallel_size=2, an option of vLLM's .* must be None or 1; use tensor_paral"),
        (["--enable-fault-tolerance"], "^enable_fault_tolerance=True, .* must be None or False$"),
        (["--structured-outputs-config.disable-any-whitespace", "true"], "^structured_.*: disable_any_whi"),
        (["--nnodes"], "^--nnodes must have a value$"),
        (["--disable-sliding-window"], "^disable_sliding_window=True, .* with another config.json$"),
    ):
        with pytest.raises(InputError, match=message):
            without_vllms(argv, is_ours)


HOST = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 29}}
DISK = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": "a"}}


def test_connectors_of_vllms_that_keep_blocks_are_tiers_here():
    assert engine_config({"kv_transfer_config": HOST}).kv_offloading_size == 0.5
    config = engine_config({"kv_transfer_config": KVTransferConfig(**DISK, kv_role="kv_both")})
    assert (config.kv_offloading_size, config.kv_offloading_backend) == (1.0, "disk:a")
    assert engine_config({"kv_transfer_config": {}}) == EngineConfig()
    flags = without_vllms(["--kv-transfer-config", json.dumps(DISK)], flags_of("serve"))
    assert flags == ["--kv-offloading-size", "1.0", "--kv-offloading-backend", "disk:a"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"kv_connector": "NixlConnector"},
            "kv_connector='NixlConnector', .* use kv_offloading_size for tiers",
        ),
        ({"kv_connector": "OffloadingConnector"}, "cpu_bytes_to_use=None must be a positive int"),
        (
            HOST | {"kv_connector_module_path": "a.b"},
            "kv_connector_module_path='a.b', .* use kv_offloading_b",
        ),
        (HOST | {"kv_connector_extra_config": {"size": 1}}, "extra_config: key='size' must be one of"),
        (HOST | {"kv_conector": "a"}, "kv_transfer_config: key='kv_conector' .* kv_connector"),
    ],
)
def test_other_connectors_are_refused_with_what_to_use(value, message):
    with pytest.raises(InputError, match=message):
        engine_config({"kv_transfer_config": value})
    with pytest.raises(InputError, match="kv_offloading_size=2 must be left out beside kv_transfer_config"):
        engine_config({"kv_transfer_config": HOST, "kv_offloading_size": 2})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"best_of": 2},
            r"^best_of=2, an option of vLLM's up to \S+ \(the best of several answers\), is not ",
        ),
        ({"guided_decoding": {}}, r"^guided_decoding={}, .* must be None; use structured_outputs$"),
        ({"logits_processors": [print]}, r"^logits_processors=\[<built-in .* use logits_processors of "),
        ({"vllm_xargs": {"a": 1}}, "^vllm_xargs={'a': 1}, an option of vLLM's since .* use extra_args$"),
        ({"watermarking": True}, "^watermarking=True, .* must be None or False$"),
        ({"flat_logprobs": np.bool_(True)}, "^flat_logprobs=.*True.*, .* must be None or False$"),
    ],
)
def test_sampling_options_that_ask_for_more_are_refused_by_name(options, message):
    with pytest.raises(InputError, match=message):
        SamplingParams(**options)
    with pytest.raises(InputError, match=message):
        SamplingParams.from_optional(**options)


def test_a_line_of_json_has_the_same_names():
    line = {"prompt": "a", "max_completion_tokens": 7, "temperature": None, "seed": 2**63, "priority": None}
    asked = of_row(line | {"response_format": {"type": "text", "json_schema": None}}, {"temperature": 0.5})
    assert asked.params == SamplingParams(max_tokens=7, temperature=0.5, seed=2**63)
    assert asked.priority == 0
    assert of_row({"prompt": "a", "max_tokens": None}, {"max_tokens": 3}).params.max_tokens is None
    constraint = {"choice": ["a", "b"]}
    asked = of_row({"prompt": "a", "structured_outputs": constraint}, {})
    assert asked.params.structured_outputs == StructuredOutputsParams(**constraint)
    for option in ({"guided_json": {}}, {"response_format": {"type": "json_object"}}, {"suffix": "x"}):
        [name] = option
        with pytest.raises(InputError, match=f"^{name}="):
            of_row({"prompt": "a"} | option, {})


def test_a_line_of_json_tells_the_template_an_effort():
    """The server's rule holds; a prompt that no template makes has no effort."""

    def told(**more):
        asked, seen = of_row({"messages": [{"role": "user", "content": "a"}]} | more, {}), []
        for_llm(
            asked, lambda messages, **options: seen.append(options["kwargs"]) or {"prompt": "a"}, chat=False
        )
        return seen

    assert told(reasoning_effort=None) == [{}]
    assert told(reasoning_effort="none") == [{"enable_thinking": False, "reasoning_effort": "none"}]
    assert told(reasoning_effort="low", chat_template_kwargs={"enable_thinking": 7, "a": 1}) == [
        {"enable_thinking": 7, "reasoning_effort": "low", "a": 1}
    ]
    with pytest.raises(InputError, match="^reasoning_effort=3 must be a string"):
        told(reasoning_effort=3)
    with pytest.raises(InputError, match=r"^chat_template_kwargs=\[\] must be an object"):
        told(chat_template_kwargs=[])
    with pytest.raises(InputError, match="reasoning_effort"):
        of_row({"prompt": "a", "reasoning_effort": "low"}, {})


@pytest.mark.parametrize(
    ("title", "field", "message"),
    [
        ("EmbeddingRequest", {"embed_dtype": "float64"}, "'float32', 'float16', 'bfloat16'"),
        ("EmbeddingRequest", {"truncation_side": "right"}, "truncation_side='right', an option of vLLM's"),
        ("RerankRequest", {"max_tokens_per_doc": 5}, "max_tokens_per_doc=5, .* use truncate_prompt_tokens"),
        ("LoadLoRAAdapterRequest", {"is_3d_lora_weight": True}, "is_3d_lora_weight=True, an option of"),
        ("TokenizeRequest", {"chat_template": "{{ x }}"}, "chat_template='{{ x }}', .* use --chat-template"),
    ],
)
def test_fields_of_other_routes_are_refused_by_name(title, field, message):
    body, needed = BODIES[title]
    with pytest.raises(ValueError, match=message):
        body.model_validate(needed | field)


def test_what_nobody_knows_is_a_type_error_or_named():
    assert SamplingParams(n=3, best_of=3, seed=1).n == 3
    for make_params in (SamplingParams, SamplingParams.from_optional):
        with pytest.raises(TypeError, match="tempreature"):
            make_params(tempreature=1)
    with pytest.raises(InputError, match="option 'tempreature' must be one of prompt,"):
        of_row({"prompt": "a", "tempreature": 1}, {})


def test_parameters_may_be_changed_until_they_are_asked_with():
    params = SamplingParams(seed=2**64 - 1, min_tokens=4)
    params.max_tokens, params.stop, params.temperature = np.int64(3), "x", 0
    assert (params.max_tokens, params.stop) == (3, ("x",))
    with pytest.raises(InputError, match="^top_p=2 must be in"):
        params.top_p = 2
    with pytest.raises(AttributeError, match="no option 'max_token'"):
        params.max_token = 5
    assert params.top_p == 1
    with pytest.raises(InputError, match="^min_tokens=4 must be at most max_tokens=3$"):
        params.clone()
    params.min_tokens = 2
    assert params.clone() == params
    assert params != SamplingParams()
    with pytest.raises(TypeError, match="unhashable"):
        hash(params)


def test_the_script_reads_classes_and_their_defaults_from_source(tmp_path):
    """Two small distributions: bases, other classes' defaults, functions and flags; since and until when."""
    configs = "class Model:\n    seed: int = 0\n    names: list[str] = field(default_factory=list)\n"
    old = "class EngineArgs:\n    gone: int = 7\n    seed: int = 3\n"
    new = (
        "class EngineArgs(Base):\n    seed: int = Model.seed\n    names: list = get_field(Model, 'names')\n"
        "    _own: int = 1\n    made: Model = get_model()\n    LIMIT: ClassVar[int] = 3\n"
        "class Base:\n    is_on: bool | None = Field(None, ge=0)\n"
        "def add(parser):\n    parser.add_argument('--is-on', '-io', **kwargs)\n"
    )
    llm = "class LLM:\n    def __init__(self, model: str, *, late: bool = True): pass\n"
    flags = "parser.add_argument('--quiet', action='store_true')\n"
    for version, text in (("0.9.1", old), ("0.10.0", new)):
        with tarfile.open(tmp_path / f"vllm-{version}.tar.gz", "w:gz") as files:
            for name, content in (
                ("config/model.py", configs),
                ("engine/arg_utils.py", text),
                ("entrypoints/llm.py", llm),
                ("entrypoints/openai/cli_args.py", flags),
            ):
                path = tmp_path / "text"
                path.write_text(content)
                files.add(path, f"vllm-{version}/vllm/{name}")
    archives = sorted(tmp_path.glob("*.tar.gz"), key=make._order)
    made = make.table(archives)
    assert made["versions"] == ["0.9.1", "0.10.0"]
    assert made["short"] == {"-io": "is_on"}
    assert made["names"]["EngineArgs"] == {
        "gone": {"since": "0.9.1", "last": "0.9.1", "kind": "value", "default": 7},
        "seed": {"since": "0.9.1", "kind": "value", "default": 0},
        "names": {"since": "0.10.0", "kind": "list", "default": []},
        "made": {"since": "0.10.0", "kind": "value"},
        "is_on": {"since": "0.10.0", "kind": "flag", "default": None},
        "model": {"since": "0.9.1", "kind": "value"},
        "late": {"since": "0.9.1", "kind": "flag", "default": True},
    }
    assert made["names"]["FrontendArgs"] == {"quiet": {"since": "0.9.1", "kind": "flag", "default": False}}
    assert json.loads("\n".join(make.lines(made))) == made


DRAFTS = {"method": "draft_model", "model": "a-small-model", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("option", "values", "refusal"),
    [
        (
            "structured_outputs_config",
            {"disable_any_whitespace": True},
            "use structured_outputs of ",
        ),
        ("structured_outputs_config", {"disable_additional_properties": True}, "must be None or False"),
        ("structured_outputs_config", {"reasoning_parser": "qwen3"}, "use --reasoning-parser"),
        ("structured_outputs_config", {"enable_in_reasoning": True}, "must be None or False"),
        (
            "structured_outputs_config",
            {"backand": "auto"},
            "the nearest is 'backend'",
        ),
        ("structured_outputs_config", '{"reasoning_parser": "x"}', "reasoning_parser='x', an option of vLLM"),
        ("structured_outputs_config", 7, "=7 must be None or an object with keys of backend"),
        ("structured_outputs_config", {"backend": "xgrammar", "disable_any_whitespace": False}, None),
        ("structured_outputs_config", {"reasoning_parser": "", "disable_fallback": True}, None),
        ("structured_outputs_config", '{"backend": "auto"}', None),
        ("guided_decoding_disable_any_whitespace", True, "use structured_outputs of each request"),
        ("guided_decoding_disable_additional_properties", True, "use structured_outputs of each request"),
        ("guided_decoding_disable_any_whitespace", False, None),
        ("guided_decoding_disable_fallback", True, None),
        ("spec_decoding_acceptance_method", "typical_acceptance_sampler", "another rule"),
        ("spec_decoding_acceptance_method", "rejection_sampler", None),
        ("speculative_config", DRAFTS | {"draft_tensor_parallel_size": 1, "enforce_eager": True}, None),
        ("speculative_config", DRAFTS | {"rejection_sample_method": "strict", "max_model_len": 2048}, None),
        ("speculative_config", DRAFTS | {"rejection_sample_method": "synthetic"}, "must be None or 'strict'"),
        ("speculative_config", DRAFTS | {"draft_tensor_parallel_size": 2}, "must be None or 1"),
        ("speculative_config", DRAFTS | {"parallel_drafting": True}, "must be None or False"),
        ("speculative_config", DRAFTS | {"num_speculative_token": 3}, "nearest is 'num_speculative_tokens'"),
    ],
)
def test_keys_of_an_option_are_judged_as_options_are(option, values, refusal):
    """What asks for nothing passes, and what would change answers is served or refused."""
    if refusal is None:
        engine_config({option: values})
        return
    with pytest.raises(InputError, match=refusal):
        engine_config({option: values})


def test_a_name_that_is_misspelled_is_told_with_the_nearest():
    for made, options, told in (
        (
            SamplingParams,
            {"max_token": 3},
            "'max_token' must be .*: the nearest is 'max_tokens'",
        ),
        (BeamSearchParams, {"beam_widht": 3}, "'beam_widht' must be one of .*: the nearest is 'beam_width'"),
        (EngineArgs, {"foo": 1}, "option 'foo' must be one of attention, .*: it is unknown"),
        (EngineArgs, {"max_model_length": 1}, "the nearest is 'max_model_len'"),
        (EngineArgs, {"max_tokens": 1}, "option 'max_tokens' must be given to SamplingParams"),
        (LLM, {"max_tokens": 1, "model": "tiny"}, "option 'max_tokens' must be given to SamplingParams"),
        (LLM, {"max_num_seq": 1, "model": "tiny"}, "the nearest is 'max_num_seqs'"),
    ):
        with pytest.raises(InputError, match=told) as error:
            made(**options)
        assert isinstance(error.value, TypeError), "as Python's own error is"

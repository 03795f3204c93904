"""`jaxpaged bench latency` and `throughput`: what they ask, what they tell, and what they refuse."""

import json

import pytest

from jaxpaged import cli
from jaxpaged.api.llm import LLM
from jaxpaged.checks import InputError
from jaxpaged.commands import bench_offline
from jaxpaged.research.bench import datasets
from tests import tiny, tiny_lora
from tests.commands.test_cli import FAST
from tests.tiny_gguf import write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_gguf(tmp_path_factory.mktemp("bench") / "tiny.gguf"))


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, **tiny.DEFAULTS)


@pytest.fixture
def bench(model, tmp_path, capsys):
    """Call it with a command's arguments for what it prints and what it writes."""

    def run(*arguments):
        out = tmp_path / "results.json"
        assert cli.main(["bench", *arguments, "--model", model, *FAST, "--output-json", str(out)]) == 0
        return capsys.readouterr().out, json.loads(out.read_text())

    return run


@pytest.fixture
def samples(llm):
    """Call it with flags of `bench throughput` for the requests that they mean."""

    def make(*flags):
        args = cli.parser().parse_args(["bench", "throughput", *flags])
        bench_offline.choose_dataset(args)
        args.random_range_ratio = bench_offline.range_ratios(args.random_range_ratio)
        return datasets.make(args, llm, args.num_prompts, args.seed)

    return make


def ids(sample):
    return sample.prompt["prompt_token_ids"]


def test_latency_tells_each_batch(bench):
    flags = ["--input-len", "9", "--output-len", "4", "--batch-size", "3", "--num-iters", "4"]
    # With the cache, so that the program is the one of other tests.
    more = ["--num-iters-warmup", "1", "--n", "2", "--enable-prefix-caching"]
    out, told = bench("latency", *flags, *more)
    assert len(told["latencies"]) == 4
    assert told["avg_latency"] == pytest.approx(sum(told["latencies"]) / 4)
    assert list(told["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    # What an earlier batch has left would be found: without being asked, nothing is kept.
    assert cli.parser().parse_args(["bench", "latency"]).enable_prefix_caching is False
    assert told["percentiles"]["99"] <= max(told["latencies"])
    assert f"Avg latency: {told['avg_latency']} seconds" in out
    assert f"99% percentile latency: {told['percentiles']['99']} seconds" in out


def test_throughput_counts_what_was_answered(bench, tmp_path):
    lengths = ["--input-len", "8", "--output-len", "5", "--num-prompts", "6", "--n", "2"]
    out, told = bench("throughput", *lengths, "--num-warmups", "1")
    assert (told["num_requests"], told["total_num_tokens"]) == (6, 6 * (8 + 2 * 5))
    assert told["tokens_per_second"] == pytest.approx(told["total_num_tokens"] / told["elapsed_time"])
    assert "Total num prompt tokens:  48\nTotal num output tokens:  60\n" in out
    _, again = bench("throughput", *lengths, "--async-engine", "--disable-detokenize")
    assert again["total_num_tokens"] == told["total_num_tokens"]


@pytest.mark.nightly
def test_searches_adapters_and_profiles(bench, model, tmp_path):
    flags = ["--input-len", "5", "--output-len", "3", "--num-iters", "1", "--num-iters-warmup", "0"]
    bench("latency", *flags, "--use-beam-search", "--n", "2")
    path = str(tiny_lora.write(tmp_path / "adapter", 1))
    adapters = ["--enable-lora", "--max-loras", "3", "--max-lora-rank", "8", "--lora-path", path]
    _, told = bench("throughput", "--input-len", "5", "--output-len", "3", "--num-prompts", "4", *adapters)
    assert told["num_requests"] == 4
    folder = tmp_path / "profile"
    command = ["bench", "latency", *flags, "--model", model, *FAST, "--profile", str(folder)]
    assert cli.main(command) == 0
    assert list(folder.rglob("*.xplane.pb"))


def test_random_requests_have_the_lengths_that_were_asked_for(samples):
    flags = ["--num-prompts", "40", "--random-input-len", "20", "--random-output-len", "10"]
    ranges = ["--random-range-ratio", '{"input": 0.5, "output": 0.2}']
    made = samples(*flags, *ranges, "--random-prefix-len", "4")
    assert {sample.prompt_len for sample in made} <= {*range(14, 35)}
    assert len({sample.prompt_len for sample in made}) > 5
    assert {sample.output_len for sample in made} == {8, 9, 10, 11, 12}
    assert len({tuple(ids(sample)[:4]) for sample in made}) == 1
    assert len({tuple(ids(sample)[4:]) for sample in made}) == 40
    assert all(len(ids(sample)) == sample.prompt_len and 0 not in ids(sample) for sample in made)
    assert samples(*flags, *ranges, "--random-prefix-len", "4") == made
    assert samples(*flags, "--seed", "1") != samples(*flags)
    assert {sample.prompt_len for sample in samples("--num-prompts", "3", "--input-len", "7")} == {7}
    repeated = ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "3"]
    made = samples(*repeated, "--num-prompts", "9", "--prefix-repetition-prefix-len", "6")
    beginnings = [tuple(ids(sample)[:6]) for sample in made]
    assert {beginnings.count(each) for each in beginnings} == {3}
    assert {sample.prompt_len for sample in made} == {6 + 256}


def test_requests_of_files(samples, tmp_path):
    path = tmp_path / "talks.json"
    talks = [
        {"conversations": [{"value": "a b c d e"}, {"value": "ab " * n}]} for n in (1, 10, 20, 30)
    ]  # the first answer is too short
    others = [{"conversations": [{"value": "abc"}]}, {"id": 1}, {"conversations": [{}, {}]}]
    long = {"conversations": [{"value": "a " * 3000}, {"value": "ab " * 10}]}
    path.write_text(json.dumps([*talks, *others, long]))
    made = samples("--dataset-path", str(path), "--num-prompts", "7")
    assert len(made) == 7
    assert {sample.prompt for sample in made} == {"a b c d e"}
    lengths = {sample.output_len for sample in made[:3]}
    assert len(lengths) == 3
    assert {sample.output_len for sample in made} == lengths
    assert len(samples("--dataset-path", str(path), "--num-prompts", "7", "--no-oversample")) == 3
    fixed = samples("--dataset-path", str(path), "--num-prompts", "4", "--output-len", "2")
    assert [sample.output_len for sample in fixed] == [2] * 4

    path.write_text('{"prompt": "ab", "output_tokens": 3}\n\n{"prompt": "cd", "output_tokens": 5}\n')
    custom = ["--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "2"]
    made = samples(*custom)
    assert {(sample.prompt["prompt"], sample.output_len) for sample in made} == {
        ("user:ab<|end|>", 3),
        ("user:cd<|end|>", 5),
    }
    made = samples(*custom, "--skip-chat-template", "--custom-output-len", "9")
    assert {(sample.prompt, sample.output_len) for sample in made} == {("ab", 9), ("cd", 9)}
    path.write_text('{"prompt": "ab"}\n')
    with pytest.raises(InputError, match="line 1: output_tokens=None must be an int >= 1"):
        samples(*custom)
    path.write_text("[1")
    with pytest.raises(InputError, match="must be JSON"):
        samples("--dataset-path", str(path))
    path.write_text("[]")
    with pytest.raises(InputError, match="a file with at least one request that can be used"):
        samples("--dataset-path", str(path))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["latency", "--batch-size", "0"], "batch_size=0 must be an int >= 1"),
        (["latency", "--output-json", "/no/such/file"], "cannot be written"),
        (["throughput", "--dataset-name", "sharegpt"], "--dataset-path=None must be given for sharegpt"),
        (["throughput", "--random-range-ratio", "1"], "random_range_ratio='1' must be in [0, 1)"),
        (["throughput", "--lora-path", "a"], "--lora-path='a' must be given with --enable-lora"),
        (["throughput"], "max_model_len=128 must be at least 1152, prompt and answer of the longest request"),
    ],
)
def test_mistakes_are_one_line(model, capsys, flags, said):
    assert cli.main(["bench", *flags, "--model", model, *FAST]) == 2
    assert said in capsys.readouterr().err

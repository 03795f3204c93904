"""`jaxpaged info`: versions, devices, and the cache for a model. Imports nothing heavy at the top."""

import argparse
from collections.abc import Iterable

import jaxpaged
from jaxpaged.checks import InputError
from jaxpaged.commands.engine_options import add_engine_options, engine_options
from jaxpaged.commands.output import log_to_stderr, write_stdout
from jaxpaged.commands.parser import Commands
from jaxpaged.config import config_of


def add_info(commands: Commands) -> None:
    """Add the command to the command line."""
    info = commands.add_parser(
        "info", help="print versions, devices, implementations, and the cache for a model"
    )
    info.set_defaults(command=run)
    info.add_argument("--seed", type=int, help="seed of requests without one (default 0)")
    add_engine_options(info)


def run(args: argparse.Namespace) -> None:
    """Print them; of the default model's, if its package is missing, why. Raises `InputError`."""
    config = config_of(engine_options(args))
    log_to_stderr(args.verbose)

    import platform
    from importlib import metadata

    import jax
    from flax import nnx

    from jaxpaged.api.draft import draft_of
    from jaxpaged.engine import capacity, gpu_flags, machine, start
    from jaxpaged.engine.drafted import shapes_beside
    from jaxpaged.engine.setup import Setup, resolve_dtype
    from jaxpaged.models import loading, overrides
    from jaxpaged.models.quantised import codes as quantised
    from pallas_kernels import native
    from pallas_kernels.compilation_cache import compilation_cache_dir
    from pallas_kernels.gpu import targets

    gpu_flags.set_defaults(config)
    lines = [(name, metadata.version(name)) for name in ("jax", "jaxlib", "flax", "numpy", "transformers")]
    lines = [("jaxpaged", jaxpaged.__version__), ("python", platform.python_version()), *lines]
    lines += [("device", f"{d.device_kind} ({d.platform} {d.id})") for d in jax.devices()]
    if target := targets.target_of(jax.devices()[0]):
        lines.append(("target", str(target)))
    folder = compilation_cache_dir()
    programs = ("programs", f"kept in {folder}" if folder else "not kept")
    try:
        checkpoint = loading.open_checkpoint(
            args.model, overrides=overrides.gathered(args.hf_overrides, args.rope_scaling, args.rope_theta)
        )
    except InputError as error:
        if args.model != loading.SMOLLM2:
            raise
        no_native = native.why_not(resolve_dtype(config))
        native_products = f"none: {no_native}" if no_native else native.instructions()
        _print([*lines, ("native", native_products), programs, ("model", f"none: {error}")])
        return
    model = checkpoint.config
    draft = draft_of(config, checkpoint)
    setup = Setup(config, model, None if draft is None else draft.config)
    attention, dtype = f"{setup.attention}: {setup.attention_reason}", setup.dtype
    how = config.quantization or checkpoint.quant_method
    kernels = quantised.implementations(nnx.state(checkpoint.abstract(setup.load_as()))) if how else {}
    no_native, form = native.why_not(dtype), setup.load_as().form
    products = f"xla: {no_native}" if no_native else f"native: {native.instructions()}"
    if no_native and form.loops:
        products = f"{form.stacked}: loop_over_layers"
    machine.keep_on_disk()  # what a GPU's loop is compiled for here, a start finds there
    cache = start.cache_size(setup, shapes_beside(draft, setup, checkpoint.abstract))
    longest = capacity.longest_that_fits(setup, cache)
    groups = setup.grouping
    room = f"{cache.num_tokens:,} tokens"
    if groups.num_groups > 1:
        room = f"for {groups.num_groups} groups of up to {groups.width} layers"
    lines += [
        ("attention", attention),
        ("products", products),
        programs,
        (
            "model",
            f"{args.model}: {model.num_layers} layers, {model.num_q_heads} query heads and "
            f"{model.num_kv_heads} kv heads of {model.head_dim}, vocabulary {model.vocab_size}",
        ),
        ("dtype", str(dtype)),
        *([("quantization", how)] if how else []),
        *(("", f"{kernel} products for {n} of its weights") for kernel, n in kernels.items()),
        ("rows", f"{config.max_num_seqs} sequences of up to {longest} tokens"),
        ("layout", str(setup.layout)),
        (
            "cache",
            f"{cache.num_blocks} blocks of {cache.block_size} tokens, {cache.bytes_per_block:,} bytes each: "
            f"{room} in {cache.num_bytes / 2**20:,.1f} MiB",
        ),
        ("", cache.why),
        *(("", line) for line in (cache.budget.lines() if cache.budget else ())),
    ]
    _print(lines)
    capacity.served_len(setup, cache)  # where an engine would not start, that is said last


def _print(lines: Iterable[tuple[str, str]]) -> None:
    for name, value in lines:
        write_stdout(f"{name:<14}{value}")

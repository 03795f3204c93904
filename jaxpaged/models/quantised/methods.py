"""Methods of quantised safetensors files: AWQ, GPTQ, AutoRound, compressed-tensors, fp8.

Each makes codes, scales and minima of a part of a product's tensors. Of how many bits codes are, and how many
inputs share a scale, the tensors' own shapes say. `reference/quantised_checkpoints.py` says what they mean.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import InputError, check, shown
from jaxpaged.models.names import Shape
from jaxpaged.models.quantised.codes import CodedRows, CodeFormat, TensorSlice, in_words

type Said = Mapping[str, Any]  # quantization_config
type Found = tuple[CodeFormat, Callable[[TensorSlice], CodedRows]]

FLOATS = ("float32", "bfloat16", "float16")
BITS = (4, 8)
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # position of eight neighbouring outputs in a word
# AutoRound's packings by method. Its own has zero points as GPTQ's second version.
AUTO_ROUND = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:exllamav2": "gptq_v2",
}
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")  # NVIDIA's Model Optimizer: e4m3 by tensor, by output


class Module(NamedTuple):
    """The tensors of one product, by what follows its name. Each of its `chunks`, which have as many outputs,
    may have blocks of scales of its own.
    """

    name: str
    tensors: Mapping[str, np.ndarray]
    chunks: int = 1

    def __contains__(self, ending: object) -> bool:
        return f"{self.name}.{ending}" in self.tensors

    def get(self, ending: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> np.ndarray:
        """Return a tensor, checked to be of one of these types and shapes. Nothing of it is read yet."""
        name = f"{self.name}.{ending}"
        if name not in self.tensors:
            raise InputError(f"the weights lack {name!r}, which quantization_config asks for")
        tensor = self.tensors[name]
        if tensor.dtype.name not in dtypes:
            raise InputError(f"weight {name!r} has type {tensor.dtype.name}, must be {' or '.join(dtypes)}")
        if shapes and tensor.shape not in shapes:
            rule = " or ".join(map(str, dict.fromkeys(shapes)))
            raise InputError(f"weight {name!r} has shape {tensor.shape}, must be {rule}")
        return tensor

    def scales(self, ending: str) -> np.ndarray:
        scales = self.get(ending, FLOATS)
        if scales.ndim > 2:
            raise InputError(
                f"weight {self.name}.{ending!r} has shape {scales.shape}, must be of 0 to 2 axes"
            )
        return scales

    def finite(self, ending: str, *at: slice) -> np.ndarray:
        """Return scales, all or those at these indices, in float32. Raises `InputError` unless finite."""
        scales = np.asarray(self.scales(ending)[at], np.float32)
        if not np.isfinite(scales).all():
            raise InputError(f"weight '{self.name}.{ending}' has NaN or infinity in it, must be finite")
        return scales


class Method(NamedTuple):
    """The form in which a `quant_method` keeps weights."""

    check: Callable[[Said], None]
    marks: tuple[str, ...]  # tensors that mark a module as quantised
    parts: tuple[str, ...]  # tensors that may replace its weight
    found: Callable[[Module, Shape, Said], Found]


def _check(said: Said, name: str, *values: Any, where: str = "") -> None:
    """Refuse a value that is none of these."""
    value = said.get(name)
    rule = " or ".join("left out" if value is None else shown(value) for value in values)
    check(f"quantization_config: {where}{name}", value, rule, value in values)


def _check_awq(said: Said) -> None:
    _check(said, "bits" if "bits" in said else "w_bit", 4)
    _check(said, "version", "gemm", "GEMM", None)
    _check(said, "zero_point", True, None)


def _check_gptq(said: Said) -> None:
    _check(said, "bits", *BITS)
    _check(said, "checkpoint_format", "gptq", "gptq_v2", None)
    _check(said, "is_marlin_format", False, None)
    _check(said, "pack_dtype", "int32", None)
    for name in ("desc_act", "sym"):
        _check(said, name, True, False, None)


def _check_auto_round(said: Said) -> None:
    _check(said, "bits", *BITS)
    _check(said, "data_type", "int", None)
    _check(said, "act_bits", 16, None)
    _check(said, "sym", True, False, None)
    _check(said, "rotation_config", None)
    _check(said, "packing_format", *AUTO_ROUND, None)


def _check_modelopt(said: Said) -> None:
    nested = said.get("quantization")  # nested as in hf_quant_config.json
    _check(nested if isinstance(nested, Mapping) else said, "quant_algo", *MODELOPT)


def _check_fp8(said: Said) -> None:
    _check(said, "fmt", "e4m3", "float8_e4m3fn", None)
    _block("weight_block_size", said.get("weight_block_size"))


def _check_compressed(said: Said) -> None:
    formats = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    _check(said, "format", *formats, "mixed-precision")
    sparsity = said.get("sparsity_config") or {}
    rule = "'dense' or left out: 2:4 sparse weights are not served"
    format_ = sparsity.get("format") if isinstance(sparsity, Mapping) else sparsity
    check("quantization_config: sparsity_config's format", format_, rule, format_ in ("dense", None))
    transforms = said.get("transform_config") or None
    check("quantization_config: transform_config", transforms, "left out", not transforms)
    groups = said.get("config_groups")
    is_one = isinstance(groups, Mapping) and all(isinstance(group, Mapping) for group in groups.values())
    check("quantization_config: config_groups", groups, "a JSON object of objects", is_one)
    for name, group in dict(groups or {}).items():
        where, weights = f"config_groups: {name}: ", group.get("weights") or {}
        _check(group, "format", *formats, None, where=where)
        _check(weights, "num_bits", *BITS, where=f"{where}weights: ")
        _check(weights, "type", "int", "float", None, where=f"{where}weights: ")
        _block(f"{where}weights: block_structure", weights.get("block_structure"))


def _block(name: str, value: Any) -> tuple[int, int] | None:
    """Return the numbers of outputs and inputs of a block with one scale."""
    if value is None:
        return None
    is_one = isinstance(value, list) and len(value) == 2 and all(type(x) is int and x > 0 for x in value)
    is_one = is_one and value[1] % 4 == 0
    check(f"quantization_config: {name}", value, "two ints > 0, the second a multiple of 4", is_one)
    return value[0], value[1]


def _awq(module: Module, shape: Shape, said: Said) -> Found:
    num_outputs, num_inputs = shape
    num_groups = _rows_of_scales(module, num_outputs)
    words = num_outputs // 8
    weight = module.get("qweight", ("int32",), (num_inputs, words))
    zeros = module.get("qzeros", ("int32",), (num_groups, words))
    group = _group_size(module, num_inputs, num_groups, said)

    def rows(part: TensorSlice) -> CodedRows:
        def unpacked(x: np.ndarray) -> np.ndarray:
            codes = _unpacked(x, 4).reshape(len(x), -1, 8)[..., AWQ_PLACES]
            return part.of(codes.reshape(len(x), -1).T, 8)

        groups, words_of_part = part.groups(group), part.span(8)
        codes, points = unpacked(weight[part.inputs, words_of_part]), unpacked(zeros[groups, words_of_part])
        scales = part.of(module.finite("scales", groups, part.span()).T)
        return _counted_from(codes, points, scales, 4, group)

    return CodeFormat(4, group, "float32", has_minima=True), rows


def _gptq(module: Module, shape: Shape, said: Said) -> Found:
    num_outputs, num_inputs = shape
    num_groups = _rows_of_scales(module, num_outputs)
    shapes = [(num_inputs * bits // 32, num_outputs) for bits in BITS]
    weight = module.get("qweight", ("int32",), *shapes)
    bits = BITS[shapes.index(weight.shape)]
    zeros = module.get("qzeros", ("int32",), (num_groups, num_outputs * bits // 32))
    group = _group_size(module, num_inputs, num_groups, said)
    is_symmetric, has_order = said.get("sym") is not False, bool(said.get("desc_act"))
    first = 0 if said.get("checkpoint_format") == "gptq_v2" else 1  # offset of zero points
    scale_dtype = _scale_dtype(module.scales("scales")) if is_symmetric else "float32"

    def rows(part: TensorSlice) -> CodedRows:
        groups, in_word = part.groups(group), 32 // bits
        codes = part.of(_unpacked(weight[part.groups(in_word), part.span()].T, bits))
        order = _order(module, "g_idx", num_inputs, group, has_order=has_order)
        if order is not None:
            codes = codes[:, order]
        points = part.of(_unpacked(zeros[groups, part.span(in_word)], bits).T, in_word)
        points = points + np.uint8(first) & np.uint8(2**bits - 1)
        scales, middle = part.of(module.finite("scales", groups, part.span()).T), 2 ** (bits - 1)
        if not is_symmetric:
            return _counted_from(codes, points, scales, bits, group, order)
        if not np.all(points == middle):
            raise InputError(
                f"weight '{module.name}.qzeros' must mean {middle} throughout, where sym is true"
            )
        return _whole_groups(_signed(codes, bits), scales.astype(scale_dtype), None, group, order)

    return CodeFormat(bits, group, scale_dtype, not is_symmetric, has_order=has_order), rows


def _auto_round(module: Module, shape: Shape, said: Said) -> Found:
    packing = AUTO_ROUND[said.get("packing_format") or "auto_round:auto_gptq"]
    if packing == "awq":
        return _awq(module, shape, said)
    return _gptq(module, shape, {**said, "checkpoint_format": packing})


def _compressed(module: Module, shape: Shape, said: Said) -> Found:
    if "weight_packed" not in module:
        blocks = [group["weights"].get("block_structure") for group in said["config_groups"].values()]
        return _scaled(module, shape, "weight_scale", next(filter(None, blocks), None))
    num_outputs, num_inputs = shape
    shapes = [(num_outputs, in_words(num_inputs, bits) * bits // 32) for bits in BITS]
    weight = module.get("weight_packed", ("int32",), *shapes)
    bits = BITS[shapes.index(weight.shape)]
    scale = _Scale.of(module, "weight_scale", shape, bits, None)
    has_minima, has_order = "weight_zero_point" in module, "weight_g_idx" in module
    if has_minima:
        rows_of_words = in_words(num_outputs, bits) * bits // 32
        zeros = module.get("weight_zero_point", ("int32",), (rows_of_words, scale.num_groups))
    scale_dtype = "float32" if has_minima else scale.dtype

    def rows(part: TensorSlice) -> CodedRows:
        in_word = 32 // bits
        codes = _unpacked(weight[part.span(), part.groups(in_word)], bits)
        codes = part.of(codes[:, : part.inputs.stop - part.inputs.start])
        order = _order(module, "weight_g_idx", num_inputs, scale.group, has_order=has_order)
        if order is not None:
            codes = codes[:, order]
        scales = scale.rows(part)
        if has_minima:
            groups = part.groups(scale.group)
            points = part.of(_unpacked(zeros[part.span(in_word), groups].T, bits).T, in_word)
            return _counted_from(codes, points, scales, bits, scale.group, order)
        return _whole_groups(_signed(codes, bits), scales.astype(scale_dtype), None, scale.group, order)

    return CodeFormat(bits, scale.group, scale_dtype, has_minima, has_order=has_order), rows


def _fp8(module: Module, shape: Shape, said: Said) -> Found:
    name = "weight_scale_inv" if "weight_scale_inv" in module else "weight_scale"
    return _scaled(module, shape, name, said.get("weight_block_size"))


def _scaled(module: Module, shape: Shape, scale_name: str, block: list[int] | None) -> Found:
    """Read codes of a byte each, stored in the weight's own order."""
    weight = module.get("weight", ("float8_e4m3fn", "int8"), shape)
    scale = _Scale.of(module, scale_name, shape, 8, block)
    is_float = weight.dtype.name == "float8_e4m3fn"
    has_minima = not is_float and "weight_zero_point" in module
    if has_minima:
        sides = [(shape[0], scale.num_groups), *([(shape[0],), (1,), ()] if scale.num_groups == 1 else [])]
        zeros = module.get("weight_zero_point", ("int8",), *sides)
    scale_dtype = "float32" if has_minima else scale.dtype

    def rows(part: TensorSlice) -> CodedRows:
        stored, scales = part.of(np.asarray(weight[part.span(), part.inputs])), scale.rows(part)
        codes = stored.view(np.uint8 if is_float else np.int8)
        if is_float and np.any(codes & 0x7F == 0x7F):
            raise InputError(f"weight '{module.name}.weight' has NaN or infinity in it, must be finite")
        minima = None
        if has_minima:
            points = zeros if zeros.size == 1 else zeros[part.span()]
            points = points[:, part.groups(scale.group)] if points.ndim == 2 else points.reshape(-1, 1)
            points = np.asarray(points).astype(np.float32)
            minima = -scales * (points if zeros.size == 1 else part.of(points))
        return _whole_groups(codes, scales.astype(scale_dtype), minima, scale.group)

    return CodeFormat(8, scale.group, scale_dtype, has_minima, is_float=is_float), rows


class _Scale(NamedTuple):
    """One for the tensor, for each output, for each group of its inputs, or for each block of both."""

    module: Module
    name: str
    num_outputs: int
    group: int  # number of inputs
    num_groups: int
    outputs_of_block: int
    dtype: str
    chunk: int | None = None  # outputs behind which blocks begin anew

    @classmethod
    def of(cls, module: Module, name: str, shape: Shape, bits: int, block: list[int] | None) -> "_Scale":
        num_outputs, num_inputs = shape
        scales, whole = module.scales(name), in_words(num_inputs, bits)
        dtype = _scale_dtype(scales)
        if scales.size == 1 or scales.shape in ((num_outputs,), (num_outputs, 1)):
            return cls(module, name, num_outputs, whole, 1, 1 if scales.size > 1 else num_outputs, dtype)
        if block is not None:
            counts = cdiv(num_outputs, block[0]), cdiv(num_inputs, block[1])
            if scales.shape == counts:
                group = block[1] if counts[1] > 1 else whole
                return cls(module, name, num_outputs, group, counts[1], block[0], dtype)
            chunk = num_outputs // module.chunks
            if scales.shape == (module.chunks * cdiv(chunk, block[0]), counts[1]):
                group = block[1] if counts[1] > 1 else whole
                return cls(module, name, num_outputs, group, counts[1], block[0], dtype, chunk)
        if len(scales.shape) == 2 and scales.shape[0] == num_outputs and num_inputs % scales.shape[1] == 0:
            group = num_inputs // scales.shape[1]
            if group % (32 // bits) == 0:
                return cls(module, name, num_outputs, group, scales.shape[1], 1, dtype)
        raise InputError(
            f"weight '{module.name}.{name}' has shape {scales.shape}, must be one number, or one for each of "
            f"{num_outputs} outputs, for each of their groups of {num_inputs} inputs (of a multiple of "
            f"{32 // bits}), or for each block{'' if block is None else f' of {block}'}"
        )

    def rows(self, part: TensorSlice) -> np.ndarray:
        """Return the scales, float32 [outputs, groups]."""
        shape = self.module.scales(self.name).shape
        if math.prod(shape) == 1:
            return np.full((len(part.outputs), 1), self.module.finite(self.name).reshape(-1)[0])
        unit = self.outputs_of_block
        if self.chunk is not None:
            numbers = part.outputs // self.chunk * cdiv(self.chunk, unit) + part.outputs % self.chunk // unit
            first = int(numbers.min())
            there = slice(first, int(numbers.max()) + 1), part.groups(self.group)
            return self.module.finite(self.name, *there)[numbers - first]
        at = [part.span(unit), part.groups(self.group)][: len(shape)]
        scales = self.module.finite(self.name, *at)
        return part.of(np.repeat(scales.reshape(len(scales), -1), unit, axis=0), unit)


def _rows_of_scales(module: Module, num_outputs: int) -> int:
    scales = module.scales("scales")
    if scales.ndim != 2 or scales.shape[1] != num_outputs:
        rule = f"must be of {num_outputs} columns"
        raise InputError(f"weight '{module.name}.scales' has shape {scales.shape}, {rule}")
    return len(scales)


def _group_size(module: Module, num_inputs: int, num_groups: int, said: Said) -> int:
    """Return the number of inputs of a group; a module's may differ from the config's."""
    named = said.get("group_size", said.get("q_group_size"))
    if num_groups == 1:
        return in_words(num_inputs, 4)
    if type(named) is int and named > 0 and cdiv(num_inputs, named) == num_groups:
        group = named
    elif num_inputs % num_groups == 0:
        group = num_inputs // num_groups
    else:
        group = 0
    if group == 0 or group % 8:
        raise InputError(
            f"weight '{module.name}.scales' has {num_groups} groups of {num_inputs} inputs, must have groups "
            f"of a multiple of 8, or of quantization_config's group_size={shown(named)}"
        )
    return group


def _order(module: Module, ending: str, num_inputs: int, group: int, *, has_order: bool) -> np.ndarray | None:
    """Return the inputs sorted by group, where groups are not neighbours."""
    if ending not in module:
        return np.arange(num_inputs, dtype=np.int32) if has_order else None
    groups = module.get(ending, ("int32", "int64"), (num_inputs,))
    order = np.argsort(groups, kind="stable").astype(np.int32)
    neighbours = np.arange(num_inputs) // group
    if not np.array_equal(groups[order], neighbours):
        raise InputError(f"weight '{module.name}.{ending}' must name groups of {group} inputs each")
    if has_order:
        return order
    if not np.array_equal(groups, neighbours):
        rule = "must name neighbours, where desc_act is false"
        raise InputError(f"weight '{module.name}.{ending}' {rule}")
    return None


def _scale_dtype(scales: np.ndarray) -> str:
    """Return the dtype in which scales lose no bit."""
    return "float16" if scales.dtype == np.float16 else "float32"


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack the codes in words along the last axis, the lowest bits first; a byte each."""
    byte_codes = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return byte_codes
    return np.stack([byte_codes & 15, byte_codes >> 4], axis=-1).reshape(*words.shape[:-1], -1)


def _signed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes counted from 0 as products take them: those of 8 bits from -128."""
    return codes if bits == 4 else (codes ^ 0x80).view(np.int8)


def _counted_from(
    codes: np.ndarray,
    zero_points: np.ndarray,
    scales: np.ndarray,
    bits: int,
    group: int,
    order: np.ndarray | None = None,
) -> CodedRows:
    """Return (code - zero point) * scale as codes, scales and minima; exact for scales of 16 bits."""
    shift = 128 if bits == 8 else 0
    minima = scales * (np.float32(shift) - zero_points.astype(np.float32))
    return _whole_groups(_signed(codes, bits), scales, minima, group, order)


def _whole_groups(
    codes: np.ndarray,
    scales: np.ndarray,
    minima: np.ndarray | None,
    group: int,
    order: np.ndarray | None = None,
) -> CodedRows:
    """Pad rows with codes of zero to whole groups of inputs."""
    missing = scales.shape[1] * group - codes.shape[1]
    if missing:
        codes = np.pad(codes, ((0, 0), (0, missing)))
    return CodedRows(codes, scales, minima, order)


_OF_GPTQ = ("qweight", "qzeros", "scales", "g_idx")
_OF_COMPRESSED = (
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight",
)
METHODS = {
    "awq": Method(_check_awq, ("qweight",), _OF_GPTQ, _awq),
    "gptq": Method(_check_gptq, ("qweight",), _OF_GPTQ, _gptq),
    "auto-round": Method(_check_auto_round, ("qweight",), _OF_GPTQ, _auto_round),
    "fp8": Method(
        _check_fp8, ("weight_scale_inv", "weight_scale"), ("weight", "weight_scale_inv", "weight_scale"), _fp8
    ),
    "fbgemm_fp8": Method(lambda said: None, ("weight_scale",), ("weight", "weight_scale"), _fp8),
    "modelopt": Method(_check_modelopt, ("weight_scale",), ("weight", "weight_scale"), _fp8),
    "compressed-tensors": Method(
        _check_compressed, ("weight_packed", "weight_scale"), _OF_COMPRESSED, _compressed
    ),
}

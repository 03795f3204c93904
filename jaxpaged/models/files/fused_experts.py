"""Experts that lie side by side in one tensor, seen one by one as files of other models have them.

Files of Qwen 3.5 have `experts.gate_up_proj`, [num_experts, 2 * width, hidden], with each expert's gate
before its other half, and `experts.down_proj`, [num_experts, hidden, width].
"""

from collections.abc import Iterator, Mapping

import numpy as np

from jaxpaged.models.names import Names

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"
EACH = ".experts.{expert}.gate_proj"  # how names end in a family whose files may have either form


def apart(tensors: Mapping[str, np.ndarray], names: Names) -> Mapping[str, np.ndarray]:
    """Return a file's tensors with one for each expert's product, if the file has them in one and the family
    asks for one each; else the tensors as they are.
    """
    role = "experts.gate_up"  # a name for it with its ending goes first
    asked = names.table.get(f"{role}.weight", names.table.get(role, ()))
    asks_each = any(name.endswith(EACH) for name in ((asked,) if isinstance(asked, str) else asked))
    if not asks_each or not any(name.endswith(GATE_UP) for name in tensors):
        return tensors
    return _Apart(tensors)


class _Apart(Mapping[str, np.ndarray]):
    """Tensors of which those of experts are parted: views, none is copied."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        self._tensors = tensors
        # By name: the tensor, the expert, and the half of its outputs; -1: all of them.
        self._places: dict[str, tuple[str, int, int]] = {}
        self._last: tuple[str, np.ndarray] | None = None  # a tensor is mapped once for all of its experts
        for name in tensors:
            for end, products in ((GATE_UP, ("gate_proj", "up_proj")), (DOWN, ("down_proj",))):
                if not name.endswith(end) or tensors[name].ndim != 3:
                    continue
                stem = name.removesuffix(end)
                for expert in range(len(tensors[name])):
                    for half, product in enumerate(products):
                        place = name, expert, half if len(products) == 2 else -1
                        self._places[f"{stem}.experts.{expert}.{product}.weight"] = place
        fused = {name for name, *_ in self._places.values()}
        self._names = [name for name in tensors if name not in fused] + [*self._places]

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._places:
            return self._tensors[name]
        fused, expert, half = self._places[name]
        if self._last is None or self._last[0] != fused:
            self._last = fused, self._tensors[fused]
        product = self._last[1][expert]
        width = len(product) // 2
        return product if half < 0 else product[half * width : (half + 1) * width]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

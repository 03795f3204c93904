"""The adapter of a request, by vLLM's names."""

import dataclasses
import os

from jaxpaged.checks import check, checked_bool, checked_int


@dataclasses.dataclass(frozen=True)
class LoRARequest:
    """A low-rank adapter as PEFT saves them: a directory with adapter_config.json and its weights.

    Adapters are told apart by `lora_int_id`, from 1 on; the name is for people, and so is `base_model_name`,
    the model that the adapter was made for. What was read under an id is used until that is removed
    (`LLM.remove_lora`), or until `LLM.add_lora` reads it anew, with `load_inplace`. Raises `InputError`.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | os.PathLike[str]
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        is_name = isinstance(self.lora_name, str) and self.lora_name != ""
        check("lora_name", self.lora_name, "a string that is not empty", is_name)
        number = checked_int("lora_int_id", self.lora_int_id, "an int in [1, 2**31)", 1)
        object.__setattr__(self, "lora_int_id", number)
        check(
            "lora_path", self.lora_path, "a string or a path", isinstance(self.lora_path, str | os.PathLike)
        )
        path = os.fspath(self.lora_path)
        check("lora_path", path, "the name of a directory", isinstance(path, str) and "\0" not in path)
        object.__setattr__(self, "lora_path", path)
        checked_bool("load_inplace", self.load_inplace)
        base = self.base_model_name
        check("base_model_name", base, "None or a string", base is None or isinstance(base, str))

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return str(self.lora_path)

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

"""The tiny model as a file, and loaded."""

import pytest

import jaxpaged
from tests.api.tiny_llm import OPTIONS
from tests.tiny_gguf import write_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("llm") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path):
    return jaxpaged.LLM(path, **OPTIONS)

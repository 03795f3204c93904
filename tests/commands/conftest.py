"""The model of the tests of commands."""

import pytest

from tests.tiny_gguf import write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_gguf(tmp_path_factory.mktemp("cli") / "tiny.gguf"))

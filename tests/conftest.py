"""Every annotated function of the packages checks its shapes and types while the tests run."""

import os

from jaxtyping import install_import_hook

from tests import typechecker

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
install_import_hook(["jaxpaged", "pallas_kernels"], f"{typechecker.__name__}.check")

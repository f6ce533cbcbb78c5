"""What all tests on a GPU share."""

import os

import pytest

from jax_tcgemm.kernels import cache


@pytest.fixture(autouse=True, scope="session")
def shared_kernels(tmp_path_factory):
    """What one worker has compiled the others need not; the user's own cache is left alone."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cache_folder", lambda: folder)
        yield folder

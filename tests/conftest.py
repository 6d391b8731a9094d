import os
import random
from pathlib import Path

import pytest
import torch

from bestresponse.verification import base as verification

torch.set_num_threads(1)  # for problems this small, threads cost more than they give

# The systems of the solver tests are drawn anew in each run, so that none passes by one processor's rounding.
SEED = int(os.environ.get("BESTRESPONSE_TEST_SEED") or random.SystemRandom().randrange(2**31))
os.environ["BESTRESPONSE_TEST_SEED"] = str(SEED)  # for the processes of pytest-xdist
os.environ["COLUMNS"] = "100"  # whatever the terminal


def pytest_report_header():
    return f"solver systems: BESTRESPONSE_TEST_SEED={SEED}"


@pytest.fixture(autouse=True)
def _double_precision():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def _without_verification(request, monkeypatch):
    """Hypergradients do not verify derivatives, which would cost each test some passes: `verifying` turns it on."""
    monkeypatch.setattr(verification, "ENABLED", "verifying" in request.fixturenames)


@pytest.fixture
def verifying():
    """Hypergradients verify derivatives, as they do outside the tests."""


@pytest.fixture
def data_folder():
    folder = os.environ.get("BESTRESPONSE_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("BESTRESPONSE_DATA names no folder of data")
    return Path(folder)

"""The daemon on a real engine that the tests of serving share; the last of them ends it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.serving import Serving
from support.serving import serving as running_serving


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with running_serving(tmp_path_factory.mktemp("d")) as serving:
        yield serving

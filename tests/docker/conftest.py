"""Images that are built once per run, and containers of them."""

from collections.abc import Callable, Iterator

import pytest

from tests.docker.container import Container
from tests.docker.images import BASE, CPU_IMAGE, ROOT, Images, apt_mirror, why_not

Start = Callable[..., Container]


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """A storage with `BASE` in it, removed at the end."""
    if reason := why_not():
        pytest.skip(reason)
    storage = Images(tmp_path_factory.mktemp("images") / "storage")
    try:
        storage.make_base()
        yield storage
    finally:
        storage.close()


@pytest.fixture(scope="session")
def cpu_image(images: Images) -> str:
    """The image of docker/Dockerfile.cpu."""
    arguments = {"BASE": BASE, "APT_MIRROR": apt_mirror(), "REVISION": "0123abc"}
    images.build(ROOT / "docker" / "Dockerfile.cpu", CPU_IMAGE, **arguments)
    return CPU_IMAGE


@pytest.fixture(scope="module")
def start(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts a container: an image's name, the arguments behind it, and its environment."""

    def start(image: str, *arguments: str, **environment: str) -> Container:
        scratch = tmp_path_factory.mktemp("container")
        variables = {"OMP_WAIT_POLICY": "PASSIVE", **environment}
        root, config = images.mount(image), images.config(image)
        return Container(root, config, scratch / "cache", arguments, variables, scratch / "log")

    return start

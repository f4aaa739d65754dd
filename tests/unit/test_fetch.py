"""Weights from caches and from the net: checked before use, and none where none is wanted."""

import hashlib
import http.server
import io
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from dcptool.errors import EnvironmentFault, InputError, UsageError
from dcptool.network import fetch as fetching
from dcptool.network import models
from dcptool.network.fetch import Place, WeightsUnreachable


def random_state(name: str, **options: object) -> dict[str, torch.Tensor]:
    return models.load(name, pretrained=False, seed=9, **options).module.state_dict()  # type: ignore[arg-type]


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (tmp_path / "torch" / "hub" / "checkpoints").mkdir(parents=True)
    return tmp_path


def plant(caches: Path, repo: str, name: str, data: bytes, digest: str = "") -> Path:
    """Put a file into the hub's cache as the hub itself does."""
    folder = caches / "hf" / f"models--{repo.replace('/', '--')}"
    blob = folder / "blobs" / (digest or hashlib.sha256(data).hexdigest())
    link = folder / "snapshots" / ("0" * 40) / name
    for path in (blob, link, folder / "refs" / "main"):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    link.symlink_to(Path("../../blobs") / blob.name)
    (folder / "refs" / "main").write_text("0" * 40)
    return link


@pytest.fixture
def no_socket(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def refuse(*args: object, **options: object) -> None:
        calls.append("socket")
        raise OSError("network is unreachable")

    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return calls


class Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("name", ["test_resnet", "torchvision:resnet18"])
def test_offline_uses_no_socket(caches: Path, no_socket: list[str], name: str) -> None:
    with pytest.raises(WeightsUnreachable) as caught:
        models.load(name, offline=True)
    assert isinstance(caught.value, EnvironmentFault)
    assert "--checkpoint FILE" in caught.value.try_
    assert "--no-pretrained" in caught.value.try_
    with pytest.raises(UsageError):
        models.load("hf-hub:x/y", offline=True)
    models.load("test_resnet", pretrained=False)
    assert no_socket == []


@pytest.mark.parametrize("name", ["test_resnet", "torchvision:resnet18", "hf-hub:x/y"])
def test_no_route(caches: Path, no_socket: list[str], name: str) -> None:
    with pytest.raises(WeightsUnreachable, match="cannot get"):
        models.load(name)
    assert no_socket


def test_name_lookup_that_hangs(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "CONNECT_S", 0.2)
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: time.sleep(5))
    start = time.monotonic()
    with pytest.raises(WeightsUnreachable) as caught:
        models.load("torchvision:resnet18")
    assert time.monotonic() - start < 3
    assert "no answer" in caught.value.why


def test_cached_weights_need_no_network(caches: Path, no_socket: list[str]) -> None:
    state = random_state("test_resnet")
    plant(caches, "timm/test_resnet.r160_in1k", "model.safetensors", save(state))
    network = models.load("test_resnet", offline=True)
    assert torch.equal(network.module.state_dict()["fc.weight"], state["fc.weight"])
    assert no_socket == []


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_poisoned_hub_cache(caches: Path, file: str) -> None:
    mark, content = caches / "mark", io.BytesIO()
    torch.save({"a": Payload(mark)}, content)
    link = plant(caches, "timm/test_resnet.r160_in1k", file, content.getvalue(), "ab" * 32)
    with pytest.raises(InputError) as caught:
        models.load("test_resnet")
    assert "hash differs" in caught.value.why
    assert str(link) in caught.value.try_
    link.unlink()
    link.write_bytes(content.getvalue())
    with pytest.raises(InputError, match="cannot be verified"):
        models.load("test_resnet")
    link.unlink()
    plant(caches, "timm/test_resnet.r160_in1k", file, content.getvalue())
    with pytest.raises(InputError):
        models.load("test_resnet")
    assert not mark.exists()


def test_poisoned_torch_cache(caches: Path) -> None:
    mark = caches / "mark"
    path = caches / "torch" / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    torch.save({"a": Payload(mark)}, path)
    with pytest.raises(InputError) as caught:
        models.load("torchvision:resnet18")
    assert "f37072fd" in caught.value.why
    assert str(path) in caught.value.try_
    assert not mark.exists()


BODY = save({"a": torch.arange(1000.0)})
DIGEST = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.endswith((".safetensors", ".pth"))
            self.send_response(200 if found else 404)
            if found:
                self.send_header("ETag", f'"{DIGEST}"')
                self.send_header("X-Repo-Commit", "1" * 40)
            else:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", str(len(BODY) if found else 0))
            self.end_headers()
            if found and self.command == "GET":
                self.wfile.write(BODY)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    httpd.server_close()


def test_download_by_address(caches: Path, server: str) -> None:
    good = Place(url=f"{server}/net-{DIGEST[:8]}.pth")
    path, data = fetching.fetch(good, False)
    assert (data, path.read_bytes()) == (BODY, BODY)
    assert fetching.fetch(good, True) == (path, BODY)
    with pytest.raises(InputError, match="published"):
        fetching.fetch(Place(url=f"{server}/net-00000000.pth"), False)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    with pytest.raises(WeightsUnreachable, match="absent"):
        fetching.fetch(Place(url=f"{server}/absent-{DIGEST[:8]}.zip"), False)


def test_download_from_a_hub(tmp_path: Path, server: str) -> None:
    code = """
from dcptool.network.fetch import NotPublished, Place, fetch
place = Place(repo="me/mine", names=("absent.bin", "model.safetensors"))
path, data = fetch(place, False)
assert fetch(place, True)[1] == data and path.is_symlink()
try:
    fetch(Place(repo="me/mine", names=("absent.bin",)), False)
except NotPublished:
    print(len(data), path.readlink().name)
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": server}
    environment["HF_HUB_OFFLINE"] = "0"
    environment = {k: v for k, v in environment.items() if "proxy" not in k.lower()}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == [str(len(BODY)), DIGEST], done.stderr

"""Models by their id on the hub: taken from the cache without a network, or named, or fetched on demand."""

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import lily
from lily import hub

ID = "some-org/Story-Model-4bit"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = sorted(file.name for file in Path(lily.DEMO).iterdir() if file.suffix != ".md")


def fill_cache(cache: Path, commit: str = COMMIT, ref: str | None = "main") -> Path:
    """Lay the demo out as the hub's library does: blobs, and a snapshot of links to them."""
    repository = cache / f"models--{ID.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in FILES:
        shutil.copy(Path(lily.DEMO) / name, repository / "blobs" / f"blob-{name}")
        (snapshot / name).symlink_to(Path("..", "..", "blobs", f"blob-{name}"))
    if ref:
        (repository / "refs" / ref).parent.mkdir(parents=True)
        (repository / "refs" / ref).write_text(commit)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "with space ü"))
    return tmp_path / "with space ü" / "hub"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("download", [False, True])
def test_a_complete_cache_needs_no_network(cache: Path, no_network: None, download: bool) -> None:
    snapshot = fill_cache(cache)
    with lily.Model.load(ID, download=download) as model:
        assert model.info.path == str(snapshot)
        assert repr(model).startswith(f"<lily.Model {ID}: ")
        assert model.generate("A fox.", max_tokens=3, stop_tokens=()).text
    with pytest.raises(AssertionError, match="the network was used"):
        socket.create_connection(("127.0.0.1", 9))


def test_the_hubs_library_is_not_imported_for_a_complete_cache(cache: Path) -> None:
    fill_cache(cache)
    code = (
        f"import sys, lily; lily.Model.load({ID!r}); print({{'huggingface_hub', 'tqdm'}} & {{*sys.modules}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The tokenizers library may bring them; if it does not, nothing does.
    alone = subprocess.run(
        [sys.executable, "-c", "import sys, tokenizers; print({'huggingface_hub', 'tqdm'} & {*sys.modules})"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == alone.stdout


def test_a_revision_is_a_branch_a_tag_or_a_commit(cache: Path, no_network: None) -> None:
    snapshot = fill_cache(cache, ref="refs/pr/1")
    for revision in (COMMIT, "refs/pr/1"):
        assert hub.cached(ID, revision) == snapshot
    for revision in (None, "main", COMMIT[:-1]):
        with pytest.raises(lily.ModelFilesError, match="no such folder, and not in the hub's cache"):
            hub.cached(ID, revision)
    with pytest.raises(lily.ModelFilesError, match=f"`lily download {ID} --revision v2`"):
        lily.Model.load(ID, revision="v2")


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"HF_HUB_CACHE": "{}/a"}, "a"),
        ({"HUGGINGFACE_HUB_CACHE": "{}/a", "HF_HOME": "{}/b"}, "a"),
        ({"HF_HOME": "{}/b"}, "b/hub"),
        ({"HF_HOME": "$ROOM/b"}, "b/hub"),
        ({"XDG_CACHE_HOME": "{}/c"}, "c/huggingface/hub"),
        ({"HOME": "{}/d"}, "d/.cache/huggingface/hub"),
        ({"HOME": "{}/d", "HF_HOME": "~/e"}, "d/e/hub"),
    ],
)
def test_the_cache_is_where_the_hubs_library_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: str
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROOM", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    snapshot = fill_cache(tmp_path / place)
    assert hub.cached(ID) == snapshot
    theirs = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    done = subprocess.run([sys.executable, "-c", theirs], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == tmp_path / place


@pytest.mark.parametrize("offline", ["0", "1"])
def test_an_absent_model_says_how_to_fetch_it(
    cache: Path, no_network: None, monkeypatch: pytest.MonkeyPatch, offline: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    with pytest.raises(lily.ModelFilesError) as caught:
        lily.Model.load(ID)
    assert str(caught.value) == (
        f"{ID}: no such folder, and not in the hub's cache, {cache}; fetch it with `lily download {ID}`, "
        "or by Model.load(..., download=True)"
    )


@pytest.mark.parametrize("gone", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(cache: Path, no_network: None, gone: str) -> None:
    snapshot = fill_cache(cache)
    (snapshot / gone).unlink()
    with pytest.raises(
        lily.ModelFilesError, match=f"^{ID}: incomplete, {re.escape(gone)} missing in "
    ) as caught:
        lily.Model.load(ID)
    assert f"`lily download {ID}`" in str(caught.value)


def test_a_missing_shard_is_named(cache: Path, no_network: None) -> None:
    snapshot = fill_cache(cache)
    index = snapshot / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    shards = {name: f"model-0000{1 + i % 3}-of-00003.safetensors" for i, name in enumerate(names)}
    index.write_text(json.dumps({"weight_map": shards}))
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00003.safetensors")
    wanted = r"incomplete, model-00002-of-00003\.safetensors and 1 more missing in"
    with pytest.raises(lily.ModelFilesError, match=wanted):
        lily.Model.load(ID)


def test_without_an_index_there_must_be_weights(cache: Path, no_network: None) -> None:
    snapshot = fill_cache(cache)
    (snapshot / "model.safetensors.index.json").unlink()
    assert hub.cached(ID) == snapshot
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(lily.ModelFilesError, match=r"incomplete, model\.safetensors missing in"):
        hub.cached(ID)


def test_a_dangling_link_names_its_target(cache: Path, no_network: None) -> None:
    snapshot = fill_cache(cache)
    (snapshot / "picture.png").symlink_to("gone")  # which Lily does not read
    assert hub.cached(ID) == snapshot
    (snapshot / "model.safetensors").resolve().unlink()
    target = os.path.join("..", "..", "blobs", "blob-model.safetensors")
    with pytest.raises(lily.ModelFilesError) as caught:
        lily.Model.load(ID)
    assert f"incomplete, {snapshot / 'model.safetensors'} is a dangling link to {target}; " in str(
        caught.value
    )


def test_a_cache_elsewhere_or_read_only_will_do(cache: Path, tmp_path: Path, no_network: None) -> None:
    moved = tmp_path / "another disk"
    fill_cache(moved)
    cache.parent.mkdir(parents=True)
    cache.symlink_to(moved)
    for folder, _, _ in os.walk(moved):
        os.chmod(folder, 0o500)
    try:
        with lily.Model.load(ID) as model:
            assert model.generate("A fox.", max_tokens=2, stop_tokens=()).text
    finally:
        for folder, _, _ in os.walk(moved):
            os.chmod(folder, 0o700)


def test_a_folder_comes_before_an_id(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_cache(cache)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ID).parent.mkdir()
    (tmp_path / ID).symlink_to(lily.DEMO)
    with lily.Model.load(ID) as model:
        assert model.info.path == ID


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as its library asks for: one model, and files beside it that Lily has no use for."""

    files: dict[str, bytes]
    served: list[str]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{ID}/tree/"):
            tree = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for name, data in self.files.items()
            ]
            self.reply(json.dumps(tree).encode(), "application/json")
        elif path.startswith(f"/api/models/{ID}"):
            siblings = [{"rfilename": name} for name in self.files]
            answer = {"id": ID, "modelId": ID, "sha": COMMIT, "private": False, "siblings": siblings}
            self.reply(json.dumps(answer | {"tags": [], "downloads": 0}).encode(), "application/json")
        elif (name := path.removeprefix(f"/{ID}/resolve/{COMMIT}/")) in self.files:
            self.reply(self.files[name], "application/octet-stream", name)
        else:
            self.send_error(404)

    do_HEAD = do_GET  # noqa: N815  as the base class has it

    def reply(self, data: bytes, kind: str, name: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)
            self.served.append(name)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Hub.files = {name: (Path(lily.DEMO) / name).read_bytes() for name in FILES}
    Hub.files |= {"README.md": b"#", "pytorch_model.bin": b"x" * 1000, "original/other.safetensors": b"y"}
    Hub.served = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"} | variables,
    )


def test_download_brings_what_lily_reads_and_no_more(cache: Path, server: str) -> None:
    done = run("-m", "lily", "download", ID, HF_ENDPOINT=server)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder == cache / f"models--{ID.replace('/', '--')}" / "snapshots" / COMMIT
    assert sorted(file.name for file in folder.iterdir()) == FILES
    assert set(Hub.served) - {""} == set(FILES)
    assert "%|" not in done.stderr  # bars are for terminals
    with lily.Model.load(ID) as model:
        assert model.info.path == str(folder)
    # Deleted from under us: what is missing is fetched, and what is here is not.
    (folder / "tokenizer.json").resolve().unlink()
    Hub.served.clear()
    code = f"import lily; print(lily.Model.load({ID!r}, download=True, progress=False).info.path)"
    again = run("-c", code, HF_ENDPOINT=server)
    assert (again.stdout, again.returncode) == (f"{folder}\n", 0), again.stderr
    assert set(Hub.served) - {""} == {"tokenizer.json"}


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "text"),
    [
        (["some-org/other"], {}, 1, "lily: some-org/other: cannot be fetched from the hub: "),
        (["no-id"], {}, 2, "lily: no-id: wanted a model's id on the hub, org/name"),
        ([ID], {"HF_HUB_OFFLINE": "1"}, 1, f"lily: {ID}: cannot be fetched from the hub: "),
        (
            [ID, "--revision", "v2"],
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            1,
            f"lily: {ID}: cannot be fetched",
        ),
    ],
)
def test_a_download_that_fails_is_one_line(
    cache: Path, server: str, arguments: list[str], variables: dict[str, str], code: int, text: str
) -> None:
    done = run("-m", "lily", "download", *arguments, **{"HF_ENDPOINT": server} | variables)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(text), done.stderr
    assert "Traceback" not in done.stderr
    if code == 1:
        assert "; check the id and the network, " in done.stderr.splitlines()[-1]
        assert "\n" not in done.stderr.rstrip().partition("lily: ")[2]


def test_a_repository_of_something_else_is_named(cache: Path, server: str) -> None:
    for name in [name for name in Hub.files if name.endswith(".safetensors") or "index" in name]:
        del Hub.files[name]
    done = run("-m", "lily", "download", ID, HF_ENDPOINT=server)
    assert done.returncode == 1
    assert f"lily: {ID}: incomplete, model.safetensors missing in " in done.stderr
    assert "the hub has no more of it; is it an MLX checkpoint?" in done.stderr

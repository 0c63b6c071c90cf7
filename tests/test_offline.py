"""Loading and generating open no connection, and skipped tensors are mentioned once."""

import logging
import socket

import pytest

import lily
import sharding
from support import CHECKPOINTS


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"a connection was opened: {args}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_a_model_on_disk_needs_no_network(no_network):
    with lily.Model.load(lily.DEMO) as model:
        assert model.generate("Tell me a story.", max_tokens=3, seed=1).text


def test_a_hub_id_is_not_fetched_unasked(no_network, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # where it is certainly not
    with pytest.raises(lily.ModelFilesError, match=r"mlx-community/Qwen3\.6-35B-A3B-4bit"):
        lily.Model.load("mlx-community/Qwen3.6-35B-A3B-4bit")


def test_skipped_tensors_are_one_line_of_information(tmp_path, caplog):
    folder = sharding.vlm_style(CHECKPOINTS["tiny"], tmp_path / "vlm")
    with caplog.at_level(logging.INFO, logger="lily"), lily.Model.load(folder) as model:
        assert model.info.skipped_tensors == len(sharding.EXTRA)
    said = [record.getMessage() for record in caplog.records if record.name == "lily"]
    assert [line for line in said if "not read" in line] == [
        f"{folder}: {len(sharding.EXTRA)} vision and multi-token-prediction tensors not read"
    ]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

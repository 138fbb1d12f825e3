"""Making the artifact of an exported object: its content key where nothing better is known, and its sidecar."""

from __future__ import annotations

import hashlib

from pytest_quack.backends import Backend, Exported
from pytest_quack.cache import key as canonical
from pytest_quack.cache.store import Artifact, Sidecar


def environment_parts(backend: Backend) -> dict[str, bytes]:
    """The labelled parts of every content key: what makes the object and what runs it."""
    target = backend.target()
    return {
        "backend": backend.name.encode(),
        "host": canonical.encode((target.host_machine, target.host_features)),
        "toolchain": canonical.encode(sorted(backend.toolchain().items())),
    }


def make_artifact(backend: Backend, exported: Exported, *, description: str, compile_s: float) -> Artifact:
    """The artifact of an object, under its content key: that of its trace, or else the digest of the object itself."""
    target = backend.target()
    content_key = exported.content_key or canonical.digest(
        {
            "kind": b"object",
            "payload": exported.payload,
            "abi": exported.abi.encode(),
            "arch": exported.arch.encode(),
            **environment_parts(backend),
        }
    )
    sidecar = Sidecar(
        content_key=content_key,
        size_bytes=len(exported.payload),
        sha256=hashlib.sha256(exported.payload).hexdigest(),
        backend=backend.name,
        abi=exported.abi,
        arch=exported.arch,
        host_machine=target.host_machine,
        host_features=target.host_features,
        toolchain=dict(backend.toolchain()),
        description=description,
        compile_s=round(compile_s, 4),
        extra=dict(exported.extra),
    )
    return Artifact(sidecar, exported.payload)

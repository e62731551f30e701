"""Attacks on the folder of a run: full disks, folders that become read-only, and files that are no regular files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.torture.attacks import Act, Attack, NotPossible, Scene, Series

SMALL = "16m"
"""Size of the file system of a run; an undisturbed run needs 5 MB."""
FILLER = "filler"


PRIVATE = "REALIGN_TORTURE_PRIVATE"
"""Variable that is set if mounts of this process are visible to no other process and end with it."""


def private() -> list[str]:
    """Return the command that executes another one with separate mounts; empty if this is not possible."""
    for prefix in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        with suppress(NotPossible):
            command(*prefix, "mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/mnt")
            return prefix
    return []


def command(*words: str | Path) -> None:
    """Execute a command of the system.

    Raises:
        NotPossible: it does not exist or fails.
    """
    try:
        done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotPossible(f"{words[0]}: {error.strerror}") from error
    if done.returncode:
        raise NotPossible(f"{words[0]}: {done.stderr.strip() or done.returncode}")


def small_disk(*options: str) -> Act:
    """Return the act that mounts a small file system at the folder of the run."""

    def act(scene: Scene) -> None:
        can_mount(scene)
        folder = scene.run.folder
        folder.mkdir()
        command("mount", "-t", "tmpfs", "-o", ",".join((f"size={SMALL}", *options)), "tmpfs", folder)
        scene.stack.callback(take_over, scene)

    return act


def take_over(scene: Scene) -> None:
    """Replace a mounted folder by a plain copy, and unmount it."""
    folder, copy = scene.run.folder, scene.folder / "unmounted"
    shutil.copytree(folder, copy)
    command("umount", folder)
    folder.rmdir()
    copy.rename(folder)


def fill(scene: Scene) -> None:
    """Leave no space on the disk of the run."""
    with (scene.run.folder / FILLER).open("ab", buffering=0) as file, suppress(OSError):
        for size in (1 << 20, 1 << 12):
            with suppress(OSError):
                while True:
                    file.write(b"\0" * size)


def use_inodes(scene: Scene) -> None:
    """Leave no room for another file on the disk of the run."""
    folder = scene.run.folder / FILLER
    with suppress(OSError):
        folder.mkdir()
        for number in range(100_000):
            (folder / str(number)).touch()


def make_room(scene: Scene) -> None:
    """Undo `fill` or `use_inodes`."""
    filler = scene.run.folder / FILLER
    shutil.rmtree(filler) if filler.is_dir() else filler.unlink(missing_ok=True)


def limit_files(scene: Scene) -> None:
    """Limit the size of every file to less than that of a model."""
    program = "import os, resource, sys; n = 300_000; resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)); "
    scene.prefix = [sys.executable, "-c", program + "os.execv(sys.argv[1], sys.argv[1:])"]


def bind_read_only(scene: Scene) -> None:
    """Mount the folder of the run over itself, read-only. Files that are open stay writable."""
    folder = scene.run.folder
    command("mount", "--bind", folder, folder)
    command("mount", "-o", "remount,bind,ro", folder)


def hide(scene: Scene) -> None:
    """Mount an empty read-only file system over the folder of the run."""
    command("mount", "-t", "tmpfs", "-o", "ro,size=4k", "tmpfs", scene.run.folder)


def unmount(scene: Scene) -> None:
    """Undo `bind_read_only` or `hide`."""
    command("umount", scene.run.folder)


def can_mount(_: Scene) -> None:
    """Check that this process may mount.

    Raises:
        NotPossible: it may not.
    """
    if PRIVATE not in os.environ:
        raise NotPossible("this process must not mount")


def _locked(scene: Scene) -> list[Path]:
    folder = scene.run.folder
    return [*(path for path in (folder / "checkpoints", folder / "metrics.jsonl") if path.exists()), folder]


def lock(scene: Scene) -> None:
    """Make folder, checkpoints and metrics immutable (root on ext4), or else remove the right to write (others)."""
    for path in _locked(scene):
        if os.geteuid() == 0:
            command("chattr", "+i", path)
        else:
            path.chmod(0o555 if path.is_dir() else 0o444)


def unlock(scene: Scene) -> None:
    """Undo `lock`."""
    for path in reversed(_locked(scene)):
        if os.geteuid() == 0:
            command("chattr", "-i", path)
        else:
            path.chmod(0o755 if path.is_dir() else 0o644)


def can_lock(scene: Scene) -> None:
    """Check that this process may lock a folder; see `can_mount`."""
    scene.run.folder.mkdir()
    lock(scene)
    unlock(scene)
    scene.run.folder.rmdir()


def fifo(name: str) -> Act:
    """Return the act that puts a pipe in place of a file of the run."""

    def act(scene: Scene) -> None:
        path = scene.run.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.rename(path.with_name(f"{path.name}.kept"))
        os.mkfifo(path)

    return act


def no_fifo(name: str) -> Act:
    """Return the act that undoes `fifo`, and removes a folder that contains nothing else."""

    def act(scene: Scene) -> None:
        path = scene.run.folder / name
        kept = path.with_name(f"{path.name}.kept")
        path.unlink(missing_ok=True)
        if kept.exists():
            kept.rename(path)

    return act


FULL = "No space left on device"
READ_ONLY = "Read-only file system"
RECORDS = ("metrics.jsonl", "samples.jsonl", "eval_samples.jsonl")
FILES = ("realign.log", "config.yaml", "curves.png", "last_failure.json", ".hydra/config.yaml")


def disks() -> Sequence[Series]:
    """Return the attacks by full disks."""
    no_end = Attack("no space from step 3 on (tmpfs)", (75,), FULL, at={3: fill}, after=make_room)
    a_while = Attack("no space during steps 3 and 4 (tmpfs)", (0,), FULL, at={3: fill, 5: make_room})
    start = Attack("no space at all (tmpfs)", (75,), FULL, before=fill, after=make_room)
    inodes = Attack("no further file from step 3 on (tmpfs)", (75,), FULL, at={3: use_inodes}, after=make_room)
    size = Attack("files of at most 300 kB (RLIMIT_FSIZE)", (2,), "File too large", before=limit_files)
    return [
        Series("full disk, step 3 to the end", [no_end], before=small_disk()),
        Series("full disk, steps 3 and 4", [a_while], before=small_disk()),
        Series("full disk at the start", [start], before=small_disk()),
        Series("no inodes", [inodes], before=small_disk("nr_inodes=200")),
        Series("file size", [size]),
    ]


def read_only() -> Sequence[Series]:
    """Return the attacks by folders that become read-only."""
    no_end = Attack("read-only from step 3 on (bind mount)", (2,), READ_ONLY, at={3: bind_read_only}, after=unmount)
    a_while = Attack("read-only during steps 3 and 4 (bind mount)", (0,), READ_ONLY, at={3: bind_read_only, 5: unmount})
    empty = Attack("an empty read-only folder in its place", (0,), READ_ONLY, at={3: hide, 5: unmount})
    locked = Attack(
        "locked from step 3 on (chattr +i; chmod)", (2,), "not permitted|denied", at={3: lock}, after=unlock
    )
    return [
        Series("read-only, step 3 to the end", [no_end], before=can_mount),
        Series("read-only, steps 3 and 4", [a_while], before=can_mount),
        Series("hidden, steps 3 and 4", [empty], before=can_mount),
        Series("locked, step 3 to the end", [locked], before=can_lock),
    ]


def pipes() -> Sequence[Series]:
    """Return the attacks by pipes in place of files."""
    at_start = [
        Attack(f"pipe in place of {name} at the start", (2,), "is not a regular file", fifo(name), after=no_fifo(name))
        for name in (*RECORDS, *FILES)
    ]
    name = "metrics.jsonl"
    midway = Attack(
        f"pipe in place of {name} in steps 3 and 4", (0,), "is not a regular file", at={3: fifo(name), 5: no_fifo(name)}
    )
    return [Series("pipes", at_start), Series("pipe midway", [midway])]

"""`sab data get` and `sab data list`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from sab.errors import UserValueError
from sab.lab import data
from sab.lab.commands.parsing import call
from sab_cli.exits import DONE
from sab_cli.wrapping import columns, listed


def data_command(arguments: Sequence[str]) -> int:
    """Get the public data sets, or list them."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: sab data {'|'.join(COMMANDS)} [OPTIONS]\n")
        for name, command in COMMANDS.items():
            print(f"  {name:10}{(command.__doc__ or '').splitlines()[0]}")
        print("\n`sab data get --help` shows the options.")
        return DONE
    name, *rest = arguments or [""]
    if name not in COMMANDS:
        raise UserValueError(f"data must be followed by {' or '.join(COMMANDS)}; got {name or 'nothing'}.")
    return call(COMMANDS[name], rest, f"sab data {name}")


def data_get(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None,
    data_dir: Path | None = None,
) -> int:
    """Get a data set: ptb, text8, mnist, cifar10, osuleaf, plaid, ecg or imdb.

    Args:
        name: Which data set.
        source: Folder or archive (.zip, .whl, .tar.gz) that has its files, plain or as .gz or .xz, or the one file
            that it is; None gets them from their public source.
        data_dir: Folder of the data sets; None means SAB_DATA or, without one, the user's cache.
    """
    from sab.lab.data.progress import Bar

    with Bar(Console(stderr=True)) as bar:
        dataset, paths = data.get(name, data_dir, source, bar.update)
    print(f"{dataset.name}: {dataset.summary}. Its checksums are right.")
    for path in paths:
        print(path)
    return DONE


def data_list(data_dir: Path | None = None) -> int:
    """List the data sets, and whether they are here.

    Args:
        data_dir: Folder of the data sets; None means SAB_DATA or, without one, the user's cache.
    """
    folder = data.folder_of(data_dir)
    print(f"In {folder}:")
    found = data.DATASETS.items()
    states = {name: f"{data.state_of(one, folder).message}  ({one.summary})" for name, one in found}
    print("\n".join(listed(states, columns())))
    return DONE


COMMANDS: dict[str, Callable[..., int]] = {"get": data_get, "list": data_list}
"""What `sab data NAME` does."""

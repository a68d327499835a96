"""Optional packages: which extra installs each, and the error for a missing one."""

import importlib.util
from collections.abc import Iterable

EXTRAS = {
    "dp_accounting": "privacy",
    "psutil": "profile",
    "ray": "ray",
    "scipy": "privacy",
    "tensorboard": "profile",
    "xprof": "profile",
}


# For a package, another one that contains it too, as a requirement for pip.
ALSO_BRINGS = {"xprof": "tensorboard-plugin-profile>=2.20.7"}


class MissingExtraError(ModuleNotFoundError):
    """A feature needs packages that are not installed. The message gives the command that installs them."""


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module without a spec is in sys.modules
        return False


def explain_missing(feature: str, packages: Iterable[str]) -> str:
    """A sentence that names the missing packages and the command that installs them, quoted for a shell.

    `feature` starts the sentence, and packages may have a purpose: "xprof (to read traces)".
    """
    *others, last = packages
    missing = [package.partition(" ")[0] for package in (*others, last)]
    extras = ",".join(sorted({EXTRAS[package] for package in missing}))
    also = "".join(f" {ALSO_BRINGS[name]} brings {name} as well." for name in missing if name in ALSO_BRINGS)
    names = f"{', '.join(others)} and {last}, which are not installed" if others else f"{last}, which is not installed"
    return f"{feature} needs {names}. Run pip install 'keras_paragrad[{extras}]'.{also}"


def require(feature: str, *packages: str) -> None:
    """Raises a `MissingExtraError` if one of the packages is not installed; see `explain_missing`."""
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        raise MissingExtraError(explain_missing(feature, missing), name=missing[0])

"""Packaging of hvd_hetero.

`optimizers/` stands at the top level of the repository and is imported as `hvd_hetero.optimizers`, through the
relative symbolic link `hvd_hetero/optimizers -> ../optimizers`. With `package_dir` written out, wheel, sdist,
editable install, type checkers and a bare checkout all see the one package.
"""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

# The tests run on torch 2.13 and Keras 3.15. They pass on the lowest versions, too: see docs/horovod.md.
EXTRAS = {
    "torch": ["torch>=2.4"],
    "keras": ["keras>=3.10", "tensorflow-cpu>=2.18"],
    "mpi": ["mpi4py>=4.0"],
    "gpu": ["nvidia-ml-py>=12"],
    "report": ["rich>=13", "matplotlib>=3.8", "tqdm>=4.60"],
    "dev": [
        "pytest>=8", "pytest-xdist>=3.5", "ruff>=0.6", "mypy>=1.11", "matplotlib>=3.8", "scikit-learn>=1.3",
        "griffe>=2",
    ],
}

setup(
    name="hvd_hetero",
    version="0.1.0",
    description="Training on mixed hardware with Horovod, at the speed of all of it together",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    package_dir={"": "."},
    packages=find_packages(where=".", include=["hvd_hetero", "hvd_hetero.*"])
    # find_packages does not follow the link, so the linked package is named.
    + [name for name in ["hvd_hetero.optimizers"] if (HERE / "hvd_hetero" / "optimizers").exists()],
    package_data={"hvd_hetero": ["py.typed"], "hvd_hetero.cli": ["source/*"]},
    # Horovod's own build needs cmake, wheel, packaging and setuptools; Horovod at run time the other three.
    install_requires=["numpy>=1.26", "cloudpickle", "psutil", "pyyaml", "packaging", "setuptools", "wheel"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["hvd-hetero = hvd_hetero.cli.main:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
)

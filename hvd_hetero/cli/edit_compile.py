"""The edits of the kind "compile": with them Horovod 0.28.1 builds for today's frameworks, and quicker and smaller."""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit
from hvd_hetero.engine.build import BUILD_RECORD

EDITS: Final = (
    Edit(
        name="cxx20",
        reason="Horovod's build sets C++14, with which PyTorch's headers do not compile: they need C++20 (C++17 up to "
        "PyTorch 2.12). All parts that are linked together should use one standard",
        kind="compile",
        file="CMakeLists.txt",
        find="set(CMAKE_CXX_STANDARD 14)",
        replace="set(CMAKE_CXX_STANDARD 20)",
    ),
    Edit(
        name="cxx20",
        reason="Part of cxx20: the build of the PyTorch library sets the standard to C++14 a second time",
        kind="compile",
        file="horovod/torch/CMakeLists.txt",
        find="set(CMAKE_CXX_STANDARD 14)",
        replace="set(CMAKE_CXX_STANDARD 20)",
    ),
    Edit(
        name="no_xla_file",
        reason="xla_mpi_ops.cc does not compile with TensorFlow 2.21, which does not install the highwayhash header "
        "that it needs. The file is for XLA on GPUs alone, and is left out",
        kind="compile",
        needs=("tensorflow",),
        file="horovod/tensorflow/CMakeLists.txt",
        find='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        replace="",
    ),
    Edit(
        name="no_cuda",
        reason="Horovod's build tries to compile its CUDA part if PyTorch is a build for CUDA and names any folder as "
        "CUDA_HOME, even if there is no CUDA compiler. On such a machine Horovod is now built for CPUs",
        kind="compile",
        needs=("torch", "no_cuda"),
        file="cmake/Modules/FindPytorch.cmake",
        find="print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
        replace="print(False)",
    ),
    Edit(
        name="own_includes",
        reason="g++ 13 and later refuse Horovod's source: it uses std::logic_error without including its header, "
        "which only older compilers include through other headers",
        kind="compile",
        file="horovod/common/common.h",
        find="#include <memory>\n#include <string>\n",
        replace="#include <memory>\n#include <stdexcept>\n#include <string>\n",
    ),
    Edit(
        name="own_includes",
        reason="Part of own_includes: std::string is used in group_table.h without including its header",
        kind="compile",
        file="horovod/common/group_table.h",
        find="#include <queue>\n",
        replace="#include <queue>\n#include <string>\n",
    ),
    Edit(
        name="own_includes",
        reason="Part of own_includes: Gloo uses uint8_t and similar types without including their header, which g++ "
        "12 includes through iostream, and later versions do not",
        kind="compile",
        file="third_party/gloo/gloo/types.h",
        find="#include <iostream>\n",
        replace="#include <cstdint>\n#include <iostream>\n",
    ),
    Edit(
        name="assigned_span",
        reason="g++ 14 refuses flatbuffers: an assignment operator in a template assigns to a const member. Older "
        "compilers do not notice, as the template is never used",
        kind="compile",
        file="third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        find="const size_type count_;",
        replace="size_type count_;",
    ),
    Edit(
        name="no_distutils",
        reason="Horovod's build asks distutils for the path of Python's headers. Python 3.12 has no distutils any "
        "more: the path would be empty, and Python.h would not be found",
        kind="compile",
        file="horovod/torch/CMakeLists.txt",
        find="from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        replace="import sysconfig; print(sysconfig.get_paths()['include'])",
    ),
    Edit(
        name="no_distutils",
        reason="Part of no_distutils: js_run.py imports distutils, which Python 3.12 does not have, and horovodrun "
        "imports js_run.py at its start",
        kind="compile",
        file="horovod/runner/js_run.py",
        find="from distutils.spawn import find_executable\n",
        replace="from shutil import which as find_executable\n",
    ),
    Edit(
        name="no_setup_requires",
        reason="setup_requires makes setuptools download packages in the middle of the build, though all that it "
        "lists is needed at run time only",
        kind="compile",
        file="setup.py",
        find="setup_requires=require_list if is_build_action() else [],",
        replace="setup_requires=[],",
    ),
    Edit(
        name="no_cffi",
        reason="Horovod's wheel requires cffi, which it has not imported since its PyTorch binding moved to pybind11",
        kind="compile",
        file="setup.py",
        find="    require_list.append('cffi>=1.4.0')",
        replace="    pass",
    ),
    Edit(
        name="no_debug_info",
        reason="Horovod is compiled with debug information, which makes the build slower and the wheel several times "
        "larger",
        kind="compile",
        file="CMakeLists.txt",
        find='string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")',
        replace='set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")',
    ),
    Edit(
        name="build_record",
        reason="nothing in a wheel of Horovod tells at run time how it was built, or which of these edits it has. "
        f"The wheel now contains the file {BUILD_RECORD}, which does",
        kind="compile",
        file="setup.py",
        find="      zip_safe=False,\n",
        replace=f"      zip_safe=False,\n      package_data={{'horovod': ['{BUILD_RECORD}']}},\n",
    ),
    Edit(
        name="compiled_once",
        reason="the build takes longer than needed: the sources that the libraries for PyTorch and TensorFlow share, "
        "which are most of the build, are compiled for each of the two. Where both frameworks use the same C++ ABI, "
        "once is enough. Builds with GPU support are left as they are, since this was not tried with them",
        kind="compile",
        needs=("torch", "tensorflow", "one_abi"),
        file="CMakeLists.txt",
        find="# TF\nadd_subdirectory(horovod/tensorflow)\n",
        replace="""if(HAVE_GLOO AND NOT HAVE_CUDA AND NOT HAVE_ROCM)
    add_library(horovod_common OBJECT ${SOURCES})
    target_include_directories(horovod_common PRIVATE "${EIGEN_INCLUDE_PATH}" "${FLATBUFFERS_INCLUDE_PATH}")
    set_property(TARGET horovod_common PROPERTY CXX_STANDARD 17)
    set(SOURCES $<TARGET_OBJECTS:horovod_common>)
endif()

# TF
add_subdirectory(horovod/tensorflow)
""",
    ),
    Edit(
        name="compiled_once",
        reason="Part of compiled_once: compiles Gloo once, without the second copy for TensorFlow",
        kind="compile",
        needs=("torch", "tensorflow", "one_abi"),
        file="CMakeLists.txt",
        find="if(HAVE_GLOO AND (DEFINED Tensorflow_CXX17 AND Tensorflow_CXX17))\n",
        replace="if(HAVE_GLOO AND NOT TARGET horovod_common AND (DEFINED Tensorflow_CXX17 AND Tensorflow_CXX17))\n",
    ),
    Edit(
        name="compiled_once",
        reason="Part of compiled_once: links TensorFlow's library with the one Gloo that is compiled",
        kind="compile",
        needs=("torch", "tensorflow", "one_abi"),
        file="horovod/tensorflow/CMakeLists.txt",
        find="    if (Tensorflow_CXX17)\n       list(APPEND TF_LINKER_LIBS compatible17_gloo)\n",
        replace="    if (Tensorflow_CXX17 AND NOT TARGET horovod_common)\n"
        "       list(APPEND TF_LINKER_LIBS compatible17_gloo)\n",
    ),
)

"""The edits of the kind "compile": with them Horovod 0.28.1 builds for today's frameworks, and quicker and smaller."""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit
from hvd_hetero.engine.build import BUILD_RECORD

EDITS: Final = (
    Edit(
        name="cxx20",
        reason="PyTorch's headers need C++20 (17 up to 2.12), and what is linked together should share a standard",
        kind="compile",
        file="CMakeLists.txt",
        find="set(CMAKE_CXX_STANDARD 14)",
        replace="set(CMAKE_CXX_STANDARD 20)",
    ),
    Edit(
        name="cxx20",
        reason="the PyTorch part sets the standard once more",
        kind="compile",
        file="horovod/torch/CMakeLists.txt",
        find="set(CMAKE_CXX_STANDARD 14)",
        replace="set(CMAKE_CXX_STANDARD 20)",
    ),
    Edit(
        name="no_xla_file",
        reason="TensorFlow 2.21 installs no highwayhash header; the file serves XLA on GPUs alone",
        kind="compile",
        needs=("tensorflow",),
        file="horovod/tensorflow/CMakeLists.txt",
        find='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        replace="",
    ),
    Edit(
        name="no_cuda",
        reason="beside a PyTorch for CUDA, on a machine without the CUDA toolkit, what can be built is for CPUs, "
        "whatever folder is called CUDA_HOME",
        kind="compile",
        needs=("torch", "no_cuda"),
        file="cmake/Modules/FindPytorch.cmake",
        find="print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
        replace="print(False)",
    ),
    Edit(
        name="own_includes",
        reason="std::logic_error is used; g++ 12 finds it through other headers, g++ 13 and later do not",
        kind="compile",
        file="horovod/common/common.h",
        find="#include <memory>\n#include <string>\n",
        replace="#include <memory>\n#include <stdexcept>\n#include <string>\n",
    ),
    Edit(
        name="own_includes",
        reason="and so is std::string here",
        kind="compile",
        file="horovod/common/group_table.h",
        find="#include <queue>\n",
        replace="#include <queue>\n#include <string>\n",
    ),
    Edit(
        name="own_includes",
        reason="and uint8_t and its like in Gloo, which g++ 12 finds through iostream",
        kind="compile",
        file="third_party/gloo/gloo/types.h",
        find="#include <iostream>\n",
        replace="#include <cstdint>\n#include <iostream>\n",
    ),
    Edit(
        name="assigned_span",
        reason="a member that is assigned to is not const: g++ 14 looks at templates that nobody uses as well",
        kind="compile",
        file="third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        find="const size_type count_;",
        replace="size_type count_;",
    ),
    Edit(
        name="no_distutils",
        reason="distutils left Python's standard library in 3.12; without it the include path would be empty",
        kind="compile",
        file="horovod/torch/CMakeLists.txt",
        find="from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        replace="import sysconfig; print(sysconfig.get_paths()['include'])",
    ),
    Edit(
        name="no_distutils",
        reason="horovodrun imports this module at its start",
        kind="compile",
        file="horovod/runner/js_run.py",
        find="from distutils.spawn import find_executable\n",
        replace="from shutil import which as find_executable\n",
    ),
    Edit(
        name="no_setup_requires",
        reason="setup_requires would download packages in the middle of the build; what it lists is needed at run time",
        kind="compile",
        file="setup.py",
        find="setup_requires=require_list if is_build_action() else [],",
        replace="setup_requires=[],",
    ),
    Edit(
        name="no_cffi",
        reason="nothing in Horovod imports cffi since its PyTorch binding moved to pybind11",
        kind="compile",
        file="setup.py",
        find="    require_list.append('cffi>=1.4.0')",
        replace="    pass",
    ),
    Edit(
        name="no_debug_info",
        reason="debug information makes the build slower and the wheel several times larger",
        kind="compile",
        file="CMakeLists.txt",
        find='string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")',
        replace='set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")',
    ),
    Edit(
        name="build_record",
        reason=f"the wheel carries {BUILD_RECORD}, so that one can ask at run time which repairs are in",
        kind="compile",
        file="setup.py",
        find="      zip_safe=False,\n",
        replace=f"      zip_safe=False,\n      package_data={{'horovod': ['{BUILD_RECORD}']}},\n",
    ),
    Edit(
        name="compiled_once",
        reason="what the libraries for PyTorch and TensorFlow have in common is compiled for each of them, which is "
        "most of the build. Both are C++ of one ABI, so once is enough. Not where GPUs are used, which was not tried",
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
        reason="and so is Gloo",
        kind="compile",
        needs=("torch", "tensorflow", "one_abi"),
        file="CMakeLists.txt",
        find="if(HAVE_GLOO AND (DEFINED Tensorflow_CXX17 AND Tensorflow_CXX17))\n",
        replace="if(HAVE_GLOO AND NOT TARGET horovod_common AND (DEFINED Tensorflow_CXX17 AND Tensorflow_CXX17))\n",
    ),
    Edit(
        name="compiled_once",
        reason="which is then the one that TensorFlow's library is linked with",
        kind="compile",
        needs=("torch", "tensorflow", "one_abi"),
        file="horovod/tensorflow/CMakeLists.txt",
        find="    if (Tensorflow_CXX17)\n       list(APPEND TF_LINKER_LIBS compatible17_gloo)\n",
        replace="    if (Tensorflow_CXX17 AND NOT TARGET horovod_common)\n"
        "       list(APPEND TF_LINKER_LIBS compatible17_gloo)\n",
    ),
)

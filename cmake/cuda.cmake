# Looks for CUDA and NCCL as TESSERA_CUDA (AUTO, ON or OFF) asks.
# Sets TESSERA_HAS_CUDA, and with it enables the CUDA language and defines the
# target tessera_cuda with the libraries that the runtime's CUDA files need.

set(TESSERA_HAS_CUDA FALSE)
if(NOT TESSERA_CUDA)
  return()
endif()

# One reason per line; with ON the first is fatal, with AUTO it is reported.
macro(tessera_without_cuda reason)
  if(TESSERA_CUDA STREQUAL "AUTO")
    message(STATUS "Building without CUDA: ${reason}")
    return()
  endif()
  message(FATAL_ERROR "TESSERA_CUDA=ON, but ${reason}")
endmacro()

# The toolkit's installer does not put its folder on the PATH.
find_program(TESSERA_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
if(NOT TESSERA_NVCC)
  tessera_without_cuda("nvcc was not found")
endif()
if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER ${TESSERA_NVCC})
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  tessera_without_cuda("${TESSERA_NVCC} does not compile")
endif()

# sm_90 (H100, H200) as machine code, and its PTX for what comes later.
set(CMAKE_CUDA_ARCHITECTURES 90 CACHE STRING "CUDA architectures")
if(CCACHE_PROGRAM AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)  # the first with C++20
  tessera_without_cuda("nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.0")
endif()
# CUDA files take the C++ standard of the project, for which CMake before 3.26
# knows no flag.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
find_package(CUDAToolkit REQUIRED)

find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR})
if(NOT NCCL_INCLUDE_DIR OR NOT NCCL_LIBRARY)
  tessera_without_cuda("NCCL (nccl.h and libnccl.so) was not found")
endif()

add_library(tessera_cuda INTERFACE)
target_include_directories(tessera_cuda SYSTEM INTERFACE ${NCCL_INCLUDE_DIR})
target_link_libraries(tessera_cuda INTERFACE
  CUDA::cudart_static CUDA::cublasLt ${NCCL_LIBRARY})

# cuDNN's attention: the headers of cudnn-frontend (of the system, or of pip's
# package nvidia-cudnn-frontend, which lie beside the Python packages) and those
# of cuDNN. Its library is opened when the program runs, if it is there.
set(TESSERA_CUDNN_FRONTEND AUTO CACHE STRING
    "Attention by cuDNN: AUTO (where its headers are found), ON or OFF")
set_property(CACHE TESSERA_CUDNN_FRONTEND PROPERTY STRINGS AUTO ON OFF)
set(TESSERA_HAS_CUDNN_FRONTEND FALSE)
if(TESSERA_CUDNN_FRONTEND)
  find_package(Python3 COMPONENTS Interpreter)
  if(Python3_FOUND)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c
              "import sysconfig; print(sysconfig.get_path('purelib'))"
      OUTPUT_VARIABLE python_packages OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h
    HINTS ${python_packages}/include)
  find_path(CUDNN_INCLUDE_DIR cudnn.h
    HINTS ${CUDAToolkit_INCLUDE_DIRS} ${python_packages}/nvidia/cudnn/include)
  if(CUDNN_FRONTEND_INCLUDE_DIR AND CUDNN_INCLUDE_DIR)
    set(TESSERA_HAS_CUDNN_FRONTEND TRUE)
    target_include_directories(tessera_cuda SYSTEM INTERFACE
      ${CUDNN_FRONTEND_INCLUDE_DIR} ${CUDNN_INCLUDE_DIR})
    target_link_libraries(tessera_cuda INTERFACE ${CMAKE_DL_LIBS})
    message(STATUS "Attention by cuDNN: ${CUDNN_FRONTEND_INCLUDE_DIR}")
  elseif(TESSERA_CUDNN_FRONTEND STREQUAL "ON")
    message(FATAL_ERROR "TESSERA_CUDNN_FRONTEND=ON, but cudnn_frontend.h or "
                        "cudnn.h was not found (pip install "
                        "nvidia-cudnn-frontend; CUDNN_FRONTEND_INCLUDE_DIR)")
  else()
    message(STATUS "Building without cuDNN's attention: cudnn_frontend.h or "
                   "cudnn.h was not found")
  endif()
endif()

set(TESSERA_HAS_CUDA TRUE)
message(STATUS "Building with CUDA ${CMAKE_CUDA_COMPILER_VERSION} and "
               "${NCCL_LIBRARY}")

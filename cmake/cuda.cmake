# The _cuda module: enables CUDA from the system or from PyPI's wheels, then builds the kernels.

execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/build_backend/find_nvcc.py
  OUTPUT_VARIABLE nvcc OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT nvcc)
  message(FATAL_ERROR "nvcc was not found. Install the CUDA toolkit or the PyPI package "
                      "'cuda-toolkit[nvcc,cudart,cccl]==13.0.*', or set TCGEMM_CUDA=off to build without CUDA")
endif()
set(CMAKE_CUDA_COMPILER ${nvcc} CACHE FILEPATH "CUDA compiler")

# TCGEMM_CUDA_ARCHITECTURES names the targets as CMake does, separated by commas or semicolons. The
# default: sm_80 and sm_90a machine code, and PTX that other GPUs compile for themselves.
string(REPLACE "," ";" architectures "$ENV{TCGEMM_CUDA_ARCHITECTURES}")
if(architectures STREQUAL "")
  set(architectures 80-real 80-virtual 90a-real)
endif()
set(CMAKE_CUDA_ARCHITECTURES ${architectures} CACHE STRING "Targets of the CUDA kernels")
message(STATUS "CUDA kernels: ${nvcc} for ${CMAKE_CUDA_ARCHITECTURES}")

cmake_path(GET nvcc PARENT_PATH cuda_root)
cmake_path(GET cuda_root PARENT_PATH cuda_root)
if(EXISTS ${cuda_root}/lib/libcudart.so.13 AND NOT EXISTS ${cuda_root}/lib64)
  # The wheels' layout: nvcc looks for libraries in lib64 but they are in lib, and there is no
  # libcudart.so, without which FindCUDAToolkit declares no runtime at all.
  set(ENV{LIBRARY_PATH} "${cuda_root}/lib:$ENV{LIBRARY_PATH}")
  set(CUDA_CUDART ${cuda_root}/lib/libcudart.so.13 CACHE FILEPATH "CUDA runtime")
endif()

set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
# Of the host's part alone, which prepares launches: device code is always optimised in full.
set(CMAKE_CUDA_FLAGS_RELEASE "-O1 -DNDEBUG")
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.4)
  message(FATAL_ERROR "CUDA must be 12.4 or newer, got ${CMAKE_CUDA_COMPILER_VERSION} (${nvcc}). Name a newer nvcc in "
                      "CUDACXX, or set TCGEMM_CUDA=wheel to build with the compiler from PyPI")
endif()

# Apart from the module, so that nanobind's host flags do not reach nvcc. The compiler runs under a
# check that fails on register spills and serialised wgmma.
function(add_cuda_library name)
  add_library(${name} OBJECT ${ARGN})
  target_include_directories(${name} PUBLIC csrc)
  target_link_libraries(${name} PUBLIC CUDA::cudart_static)
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v --compress-mode=size>)
  set_target_properties(
    ${name} PROPERTIES CUDA_COMPILER_LAUNCHER "${Python_EXECUTABLE};${PROJECT_SOURCE_DIR}/cmake/check_ptxas.py")
endfunction()

# For kernels that do the same on all targets: translated to PTX once, for the oldest one, from which ptxas
# makes the code of each (sm_90's for sm_90a). Translation is half of the compile time. In the code only the
# instruction differs that makes a float of a bfloat16: a permutation of bytes for a shift.
function(share_ptx library)
  if(NOT "${CMAKE_CUDA_ARCHITECTURES}" MATCHES "^[0-9]")
    return() # "native" and the like are for CMake to expand
  endif()
  string(REGEX MATCHALL "[0-9]+" versions "${CMAKE_CUDA_ARCHITECTURES}")
  list(SORT versions COMPARE NATURAL)
  list(GET versions 0 oldest)
  set(codes ${CMAKE_CUDA_ARCHITECTURES})
  list(FILTER codes EXCLUDE REGEX "-virtual$")
  list(TRANSFORM codes REPLACE "^([0-9]+).*$" "sm_\\1")
  if(CMAKE_CUDA_ARCHITECTURES MATCHES "[0-9af](;|$)|-virtual")
    list(APPEND codes compute_${oldest})
  endif()
  list(REMOVE_DUPLICATES codes)
  list(JOIN codes "," codes)
  set_target_properties(${library} PROPERTIES CUDA_ARCHITECTURES OFF)
  target_compile_options(
    ${library} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_${oldest},code=[${codes}]>)
endfunction()

file(GLOB cuda_sources CONFIGURE_DEPENDS csrc/kernels/*/*.cu csrc/kernels/*/*.cc csrc/libraries/*/*.cu
     csrc/libraries/*/*.cc)
list(FILTER cuda_sources EXCLUDE REGEX "/csrc/libraries/cutensor/")
# Kernels that do the same on all targets.
set(portable_sources ${cuda_sources})
list(FILTER portable_sources INCLUDE REGEX
     "/(simt|wmma)/|/common/reduction.cu$|/rows/launch.cu$|/tensor/.*.cu$|/packed/weight.cu$|/pointer_array.cu$")
# Those that exist on sm_90a alone.
set(wgmma_sources ${cuda_sources})
list(FILTER wgmma_sources INCLUDE REGEX "/csrc/kernels/(wgmma/|common/operand_copy.cu$)")
set(reduction_sources ${cuda_sources})
list(FILTER reduction_sources INCLUDE REGEX "/csrc/kernels/common/split_reduction.cu$")
list(REMOVE_ITEM cuda_sources ${portable_sources} ${wgmma_sources} ${reduction_sources})
# Host code that launches kernels which programs bring: nvcc looks at it once, for one target.
set(launch_sources ${cuda_sources})
list(FILTER launch_sources INCLUDE REGEX
     "/(function_launch|wide_launch|ragged_launch|mma_sync/launch|packed/launch|quantize/launch|split/launch).cu$")
list(REMOVE_ITEM cuda_sources ${launch_sources})

add_cuda_library(tcgemm_kernels ${cuda_sources})
add_cuda_library(tcgemm_launch ${launch_sources})
list(GET CMAKE_CUDA_ARCHITECTURES -1 one_architecture)
set_target_properties(tcgemm_launch PROPERTIES CUDA_ARCHITECTURES ${one_architecture})
add_cuda_library(tcgemm_portable ${portable_sources})
share_ptx(tcgemm_portable)
# wgmma exists on sm_90a alone: for other targets its kernels would be empty, at the same cost in
# compile time.
add_cuda_library(tcgemm_wgmma ${wgmma_sources})
set_target_properties(tcgemm_wgmma PROPERTIES CUDA_ARCHITECTURES 90a-real)
# What adds up a product's parts begins before wgmma ends, and waits for it, which only code for sm_90 does:
# that of an older target, compiled by the driver, would read what is not there yet.
add_cuda_library(tcgemm_reduction ${reduction_sources})
if(CMAKE_CUDA_ARCHITECTURES MATCHES "^[0-9]" AND NOT CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)90")
  set_property(TARGET tcgemm_reduction APPEND PROPERTY CUDA_ARCHITECTURES 90a-real)
endif()
target_sources(tcgemm_wgmma PRIVATE ${wgmma_shapes})
target_include_directories(tcgemm_wgmma PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/generated)

nanobind_add_module(_cuda STABLE_ABI NOMINSIZE NB_STATIC csrc/modules/cuda_module.cc ${device_headers_hash})
target_include_directories(_cuda PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/generated)
target_link_libraries(_cuda PRIVATE tcgemm_shared tcgemm_kernels tcgemm_launch tcgemm_portable tcgemm_reduction
                                    tcgemm_wgmma Threads::Threads)
# Linked as C++ against the static runtime by its path: nothing is left for nvcc's own link step,
# whose library folder is the one that the wheels lack.
set_target_properties(_cuda PROPERTIES LINKER_LANGUAGE CXX)
install(TARGETS _cuda LIBRARY DESTINATION jax_tcgemm)

# Host code alone, and a module of its own: whatever is wrong with it leaves the others alone.
file(GLOB cutensor_sources CONFIGURE_DEPENDS csrc/libraries/cutensor/*.cc csrc/ffi/cutensor.cc)
nanobind_add_module(_cutensor STABLE_ABI NOMINSIZE NB_STATIC csrc/modules/cutensor_module.cc ${cutensor_sources})
target_link_libraries(_cutensor PRIVATE tcgemm_shared CUDA::cudart_static Threads::Threads)
install(TARGETS _cutensor LIBRARY DESTINATION jax_tcgemm)

# _cuda and _cutensor: host code, compiled with CUDA's headers and its static runtime alone. Kernels are compiled for the
# programs that use them (jax_tcgemm/kernels).

# The toolkit of an nvcc that is found, or the folder of CUDA's packages from PyPI.
execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/build_backend/find_cuda.py
  OUTPUT_VARIABLE cuda_root OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT cuda_root)
  message(FATAL_ERROR "CUDA's headers were not found. Install the CUDA toolkit, or the PyPI packages "
                      "nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl of one release")
endif()
find_path(cuda_include cuda_runtime_api.h PATHS ${cuda_root}/include ${cuda_root}/targets/x86_64-linux/include
          NO_DEFAULT_PATH NO_CACHE REQUIRED)
find_library(cuda_runtime libcudart_static.a PATHS ${cuda_root}/lib64 ${cuda_root}/lib
             ${cuda_root}/targets/x86_64-linux/lib NO_DEFAULT_PATH NO_CACHE REQUIRED)
file(STRINGS ${cuda_include}/cuda_runtime_api.h version_line REGEX "^#define CUDART_VERSION +[0-9]+")
string(REGEX MATCH "[0-9]+$" version "${version_line}")
math(EXPR cuda_major "${version} / 1000")
math(EXPR cuda_minor "${version} % 1000 / 10")
set(built_cuda_version ${cuda_major}.${cuda_minor})
if(built_cuda_version VERSION_LESS 12.4)
  message(FATAL_ERROR "CUDA must be 12.4 or newer, got ${built_cuda_version} (${cuda_root}). Name a newer one in CUDA_HOME, "
                      "or set TCGEMM_CUDA=wheel to build with the headers from PyPI")
endif()
message(STATUS "CUDA ${built_cuda_version}: ${cuda_include}, ${cuda_runtime}")
add_library(cuda_runtime INTERFACE)
target_include_directories(cuda_runtime SYSTEM INTERFACE ${cuda_include})
target_link_libraries(cuda_runtime INTERFACE ${cuda_runtime} ${CMAKE_DL_LIBS} Threads::Threads rt)

file(GLOB cuda_sources CONFIGURE_DEPENDS csrc/kernels/*/*.cc csrc/libraries/*/*.cc)
list(FILTER cuda_sources EXCLUDE REGEX "/csrc/libraries/cutensor/")
nanobind_add_module(_cuda STABLE_ABI NOMINSIZE NB_STATIC csrc/modules/cuda_module.cc ${cuda_sources}
                    ${device_headers_hash})
target_include_directories(_cuda PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/generated)
target_link_libraries(_cuda PRIVATE tcgemm_shared cuda_runtime)
# Qualifiers of device functions in the headers that both sides have.
target_compile_options(_cuda PRIVATE -Wno-attributes -Wno-unknown-pragmas)
# Kernels' planners and launchers have most of their headers in common. Libraries are left out: their namespaces have
# equal names, which all become visible in one translation unit.
set_target_properties(_cuda PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
file(GLOB library_sources CONFIGURE_DEPENDS csrc/libraries/*/*.cc)
set_source_files_properties(csrc/modules/cuda_module.cc ${library_sources} ${device_headers_hash}
                            PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
install(TARGETS _cuda LIBRARY DESTINATION jax_tcgemm)

# A module of its own: whatever is wrong with it leaves the others alone.
file(GLOB cutensor_sources CONFIGURE_DEPENDS csrc/libraries/cutensor/*.cc csrc/ffi/cutensor.cc)
nanobind_add_module(_cutensor STABLE_ABI NOMINSIZE NB_STATIC csrc/modules/cutensor_module.cc ${cutensor_sources})
target_link_libraries(_cutensor PRIVATE tcgemm_shared cuda_runtime)
install(TARGETS _cutensor LIBRARY DESTINATION jax_tcgemm)

# Where there is nvcc, a list of kernels is compiled ahead, for programs to find (kernels/prebuilt.py): a short one,
# or with TCGEMM_CUDA=nvcc the one of releases.
find_program(nvcc nvcc PATHS ${cuda_root}/bin NO_DEFAULT_PATH NO_CACHE)
if(nvcc)
  set(prebuilt ${CMAKE_CURRENT_BINARY_DIR}/prebuilt)
  string(TOLOWER "$ENV{TCGEMM_CUDA}" cuda_mode)
  if("${cuda_mode}" STREQUAL "nvcc")
    set(prebuilt_list ${PROJECT_SOURCE_DIR}/cmake/release_kernels.txt)
  else()
    set(prebuilt_list ${PROJECT_SOURCE_DIR}/cmake/prebuilt_kernels.txt)
  endif()
  add_custom_command(
    OUTPUT ${prebuilt}/done
    COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/compile_kernels.py --nvcc ${nvcc} --include
            ${PROJECT_SOURCE_DIR}/csrc --include ${CMAKE_CURRENT_BINARY_DIR}/generated --list ${prebuilt_list} --out
            ${prebuilt} --headers-hash ${device_headers_hash}
    COMMAND ${CMAKE_COMMAND} -E touch ${prebuilt}/done
    DEPENDS ${prebuilt_list} ${hashed_headers} ${device_headers_hash} cmake/compile_kernels.py VERBATIM)
  add_custom_target(prebuilt_kernels ALL DEPENDS ${prebuilt}/done)
  install(DIRECTORY ${prebuilt} DESTINATION jax_tcgemm FILES_MATCHING PATTERN "*.kernel")
else()
  message(STATUS "There is no nvcc in ${cuda_root}: kernels are compiled for the programs that use them alone")
endif()

# The headers of the kernels, installed so that kernels can be compiled while a program is lowered, on
# machines without a GPU too: what they include is each other, CUDA's own, and csrc/nvrtc.

set(wgmma_shapes ${CMAKE_CURRENT_BINARY_DIR}/generated/ptx/wgmma_shapes.cuh)
add_custom_command(
  OUTPUT ${wgmma_shapes}
  COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/csrc/ptx/generate_wgmma.py ${wgmma_shapes}
  DEPENDS csrc/ptx/generate_wgmma.py)
add_custom_target(tcgemm_generated_headers ALL DEPENDS ${wgmma_shapes})

file(GLOB device_headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/csrc csrc/nvrtc/* csrc/ptx/*.cuh
     csrc/tile/* csrc/epilogue/* csrc/core/packed_code.h csrc/kernels/*/*.cuh csrc/kernels/*/*config.h
     csrc/kernels/*/geometry.h)
foreach(header ${device_headers})
  cmake_path(GET header PARENT_PATH folder)
  install(FILES csrc/${header} DESTINATION jax_tcgemm/include/${folder})
endforeach()
install(FILES ${wgmma_shapes} DESTINATION jax_tcgemm/include/ptx)

# Programs carry kernels that were compiled from these headers, and say so by their hash.
set(device_headers_hash ${CMAKE_CURRENT_BINARY_DIR}/generated/core/device_headers_hash.h)
list(TRANSFORM device_headers PREPEND ${PROJECT_SOURCE_DIR}/csrc/ OUTPUT_VARIABLE hashed_headers)
list(APPEND hashed_headers ${wgmma_shapes})
list(JOIN hashed_headers "|" joined_headers)
add_custom_command(
  OUTPUT ${device_headers_hash}
  COMMAND ${CMAKE_COMMAND} -DOUT=${device_headers_hash} "-DHEADERS=${joined_headers}" -P
          ${PROJECT_SOURCE_DIR}/cmake/hash_headers.cmake
  DEPENDS ${hashed_headers} cmake/hash_headers.cmake VERBATIM)

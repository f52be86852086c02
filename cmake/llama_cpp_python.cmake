# How llama-cpp-python, or llama.cpp alone, is built for pyggml_spec: CMake includes this file after every project() of a build that is
# configured with -DCMAKE_PROJECT_INCLUDE=<this file>.

if(PROJECT_NAME STREQUAL CMAKE_PROJECT_NAME)
    add_compile_options("$<$<COMPILE_LANG_AND_ID:CXX,GNU>:SHELL:-include \"${CMAKE_CURRENT_LIST_DIR}/amx_tile_config.h\">")
endif()

# What pyggml_spec never loads is left out. Plain variables: llama-cpp-python forces the cached ones on.
if(PROJECT_NAME STREQUAL "llama_cpp")
    set(LLAMA_BUILD_TOOLS OFF)  # of tools/mtmd the library alone: encoders of pictures
    set(MTMD_VIDEO OFF)         # which starts ffmpeg
    set(LLAMA_BUILD_COMMON OFF) # what llama.cpp's own programs share: 60 files, an HTTP server among them
    set(LLAMA_OPENSSL OFF)
endif()

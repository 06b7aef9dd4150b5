// What the op (cpu.cpp) and its kernels, one for each instruction set, agree on.
#pragma once

#include <cstdint>
#include <functional>

namespace mvh {

enum class Type { float32, float64, bfloat16, float16 };

// A map of pixels (B, H, W, nh * d) by strides in elements. Offsets are 64-bit.
struct Pixels {
  void* data;
  Type type;
  int64_t batch, row, col, channel;

  int64_t offset(int64_t b, int64_t i, int64_t j, int64_t c) const {
    return b * batch + i * row + j * col + c * channel;
  }
};

// Directions: 0 right, 1 left, 2 down, 3 up.
struct Shape {
  int64_t batch, height, width, heads, dims;
  int64_t routes;
  const int64_t* direction;
  int64_t row_chunk, col_chunk;

  int64_t tokens() const { return height * width; }
  bool by_columns(int64_t r) const { return direction[r] >= 2; }
  bool reversed(int64_t r) const { return direction[r] & 1; }
  int64_t chunk(int64_t r) const { return by_columns(r) ? col_chunk : row_chunk; }
  int64_t chunks(int64_t r) const { return (tokens() + chunk(r) - 1) / chunk(r); }
  // Chunks of all directions before r; for r = routes, of all directions.
  int64_t first_chunk(int64_t r) const {
    int64_t n = 0;
    for (int64_t i = 0; i < r; ++i) n += chunks(i);
    return n;
  }
  // Whether the chunks are the rows and columns of the map, so that the memories a pixel reads
  // depend on its row and its column alone.
  bool aligned() const { return row_chunk == width && col_chunk == height; }
};

using ParallelFor =
    std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& body)>;

// Memories are contiguous, of type T: content, key, value, gains as the op documents them;
// pass (nh, d) is the sum over directions of scale * skip.
template <typename T>
struct Inputs {
  Shape shape;
  Pixels z, q;
  const T *content, *key, *value, *rate, *retention, *scale, *pass;
};

template <typename T>
struct Outputs {
  Pixels y;
  T* gains;  // (B, nh, chunks of all directions, d, d), or null
};

// Of the memories per image, (B, ...) of the input's shape, for the caller to sum in order.
// grad_scale is of the reads alone: (B, R, nh, d).
template <typename T>
struct Gradients {
  Pixels dy;
  const T* gains;
  Pixels dz, dq;
  T *content, *key, *value, *rate, *retention, *scale;
};

#define MVH_DECLARE_KERNELS(isa)                                                      \
  namespace isa {                                                                     \
  void forward(const Inputs<float>&, const Outputs<float>&, const ParallelFor&);      \
  void backward(const Inputs<float>&, const Gradients<float>&, const ParallelFor&);   \
  }
MVH_DECLARE_KERNELS(generic)
MVH_DECLARE_KERNELS(avx2)
MVH_DECLARE_KERNELS(avx512)
#undef MVH_DECLARE_KERNELS

// float64 is for tests: one instruction set will do.
namespace generic {
void forward(const Inputs<double>&, const Outputs<double>&, const ParallelFor&);
void backward(const Inputs<double>&, const Gradients<double>&, const ParallelFor&);
}  // namespace generic

}  // namespace mvh

// What the op (cpu.cpp) and its kernels, one for each instruction set, agree on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

namespace mvh {

enum class Type { float32, float64, bfloat16, float16 };

// A map of pixels (B, H, W, nh * d) by strides in elements. Offsets are 64-bit.
struct Pixels {
  void* data;
  Type type;
  int64_t size;  // of an element in bytes
  int64_t batch, row, col, channel;

  int64_t offset(int64_t b, int64_t i, int64_t j, int64_t c) const {
    return b * batch + i * row + j * col + c * channel;
  }
  // Asks for a pixel that will be needed; one outside the map does no harm.
  void prefetch(int64_t offset) const {
    const uintptr_t address = reinterpret_cast<uintptr_t>(data) + offset * size;
    __builtin_prefetch(reinterpret_cast<const void*>(address));
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
  int64_t chunk(int64_t r) const { return std::min(by_columns(r) ? col_chunk : row_chunk, tokens()); }
  int64_t chunks(int64_t r) const { return (tokens() + chunk(r) - 1) / chunk(r); }
  // Chunks of all directions before r; for r = routes, of all directions.
  int64_t first_chunk(int64_t r) const {
    int64_t n = 0;
    for (int64_t i = 0; i < r; ++i) n += chunks(i);
    return n;
  }
};

// Directions whose chunks hold the same pixels, so that what they read is one memory, the sum of
// theirs: those along rows, or along columns, if their chunks divide the map evenly; else each alone.
struct Reader {
  int64_t routes[4], count;       // of Shape
  int64_t chunk, chunks, table;  // tokens in a chunk; how many; those of directions before routes[0]

  // The chunk of this reader that is chunk c of its k-th route.
  int64_t mirrored(const Shape& s, int64_t k, int64_t c) const {
    return s.reversed(routes[k]) == s.reversed(routes[0]) ? c : chunks - 1 - c;
  }
  int64_t chunk_of(const Shape& s, int64_t i, int64_t j) const {
    const int64_t u = s.by_columns(routes[0]) ? j * s.height + i : i * s.width + j;
    return (s.reversed(routes[0]) ? s.tokens() - 1 - u : u) / chunk;
  }
};

struct Readers {
  Reader reader[4];
  int64_t count = 0;

  explicit Readers(const Shape& s) {
    for (int64_t r = 0; r < s.routes; ++r) {
      Reader* shared = nullptr;
      for (int64_t k = 0; k < count; ++k)
        if (s.by_columns(reader[k].routes[0]) == s.by_columns(r) && s.tokens() % s.chunk(r) == 0)
          shared = &reader[k];
      if (shared) {
        shared->routes[shared->count++] = r;
      } else {
        reader[count++] = {{r}, 1, s.chunk(r), s.chunks(r), s.first_chunk(r)};
      }
    }
  }
};

// How work is spread over threads. Nothing computed may depend on it.
struct Parallel {
  int64_t threads;
  std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& body)> run;

  // Whether as many equal tasks keep all threads busy.
  bool fills(int64_t tasks) const { return tasks % threads == 0 || tasks >= 4 * threads; }
};

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
  void forward(const Inputs<float>&, const Outputs<float>&, const Parallel&);      \
  void backward(const Inputs<float>&, const Gradients<float>&, const Parallel&);   \
  }
MVH_DECLARE_KERNELS(generic)
MVH_DECLARE_KERNELS(avx2)
MVH_DECLARE_KERNELS(avx512)
#undef MVH_DECLARE_KERNELS

// float64 is for tests: one instruction set will do.
namespace generic {
void forward(const Inputs<double>&, const Outputs<double>&, const Parallel&);
void backward(const Inputs<double>&, const Gradients<double>&, const Parallel&);
}  // namespace generic

}  // namespace mvh

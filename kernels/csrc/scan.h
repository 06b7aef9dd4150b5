// The directional scan of a feature map: chunks of every direction, reads, and their adjoints.
//
// Each instruction set compiles this in a namespace of its own, MVH_ISA, or the linker would take
// one set's code for all.
#pragma once

#include <algorithm>
#include <memory>
#include <new>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernel.h"
#include "srnl.h"

namespace mvh::MVH_ISA {

template <typename T>
constexpr Type own_type = sizeof(T) == 8 ? Type::float64 : Type::float32;

// Calls f with a null pointer of the pixels' type.
template <typename T, typename F>
MVH_INLINE void with_type(Type type, F&& f) {
  if constexpr (std::is_same_v<T, double>) {
    f(static_cast<double*>(nullptr));
  } else {
    switch (type) {
      case Type::bfloat16: return f(static_cast<c10::BFloat16*>(nullptr));
      case Type::float16: return f(static_cast<c10::Half*>(nullptr));
      default: return f(static_cast<float*>(nullptr));
    }
  }
}

template <typename T, int D>
MVH_INLINE void read_row(T* out, const Pixels& p, int64_t offset) {
  with_type<T>(p.type, [&](auto* type) {
    const auto* in = static_cast<decltype(type)>(p.data) + offset;
    if (p.channel == 1)
      for (int e = 0; e < D; ++e) out[e] = static_cast<T>(in[e]);
    else
      for (int e = 0; e < D; ++e) out[e] = static_cast<T>(in[e * p.channel]);
  });
}

template <typename T, int D>
MVH_INLINE void write_row(const Pixels& p, int64_t offset, const T* in) {
  with_type<T>(p.type, [&](auto* type) {
    auto* out = static_cast<decltype(type)>(p.data) + offset;
    using E = std::remove_pointer_t<decltype(type)>;
    if (p.channel == 1)
      for (int e = 0; e < D; ++e) out[e] = static_cast<E>(in[e]);
    else
      for (int e = 0; e < D; ++e) out[e * p.channel] = static_cast<E>(in[e]);
  });
}

// The way of direction r's tokens through the map, in elements, from token `first` on. The next ones
// of a line are asked for as it goes: down a column every pixel is in another page.
struct Walk {
  int64_t offset, step, turn;  // of the token; to the next in the line; from a line to the next
  int64_t length, left;        // tokens in a line, and to the end of this one

  Walk(const Shape& s, const Pixels& p, int64_t b, int64_t r, int64_t channel, int64_t first) {
    const bool columns = s.by_columns(r), reversed = s.reversed(r);
    const int64_t u = reversed ? s.tokens() - 1 - first : first, sign = reversed ? -1 : 1;
    length = columns ? s.height : s.width;
    const int64_t line = u / length, along = u % length;
    left = reversed ? along + 1 : length - along;
    step = sign * (columns ? p.row : p.col);
    turn = sign * (columns ? p.col : p.row) - (length - 1) * step;
    offset = columns ? p.offset(b, along, line, channel) : p.offset(b, line, along, channel);
  }
  void advance() {
    offset += --left ? step : turn;
    if (!left) left = length;
  }
};

// `count` tokens as rows, zeros up to a multiple of kLanes.
template <typename T, int D>
MVH_INLINE void gather(T* rows, const Pixels& p, Walk walk, int64_t count) {
  for (int64_t t = 0; t < count; ++t, walk.advance()) {
    read_row<T, D>(rows + t * D, p, walk.offset);
    p.prefetch(walk.offset + kLanes * walk.step);
  }
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  std::fill(rows + count * D, rows + padded * D, T(0));
}

// Up to kLanes tokens as rows `stride` apart: where they are, if they lie in one line and need no
// conversion, else gathered.
template <typename T, int D>
MVH_INLINE const T* tokens(T* buffer, int64_t* stride, const Pixels& p, const Walk& walk,
                           int64_t count) {
  if (walk.left < count || p.type != own_type<T> || p.channel != 1) {
    gather<T, D>(buffer, p, walk, count);
    *stride = D;
    return buffer;
  }
  for (int64_t t = 0; t < kLanes; ++t) p.prefetch(walk.offset + (kLanes + t) * walk.step);
  *stride = walk.step;
  return static_cast<const T*>(p.data) + walk.offset;
}

// Denormals are slow on some processors and memories fade into them: flush them to zero while a
// kernel runs, and leave the thread as it was.
struct FlushDenormals {
#if defined(__SSE__)
  unsigned int saved = __builtin_ia32_stmxcsr();
  FlushDenormals() { __builtin_ia32_ldmxcsr(saved | 0x8040); }
  ~FlushDenormals() { __builtin_ia32_ldmxcsr(saved); }
#endif
};

// Rows that start with cache lines: vectors that straddle two cost twice.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64)))) {}
  T* get() const { return data_.get(); }

 private:
  struct Delete {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  std::unique_ptr<T, Delete> data_;
};

// The memories of one chain at a chunk boundary. Matrices are stored by columns.
template <typename T, int D>
struct State {
  alignas(64) T content[D * D];
  alignas(64) Generators<T, D> generators;

  void start(const Inputs<T>& m, int64_t r, int64_t h, int64_t heads) {
    const int64_t n = r * heads + h;
    transpose<T, D>(content, m.content + n * D * D);
    transpose<T, D>(generators.key, m.key + n * D * D);
    transpose<T, D>(generators.value, m.value + n * D * D);
    std::copy_n(m.rate + n * D, D, generators.rate);
    std::copy_n(m.retention + n * D, D, generators.retention);
  }

  // M <- M G (46), G given by columns and by rows.
  void advance(const T* columns, const T* rows) {
    for (T* m : {content, generators.key, generators.value}) multiply<T, D>(m, columns, m);
    typename Dim<T, D>::Row row[Dim<T, D>::parts];
    for (T* m : {generators.rate, generators.retention}) {
      combine<T, D>(row, rows, m);
      store_row<T, D>(m, row);
    }
  }
};

// The chain of one image, direction and head: the content memory of every chunk, times the
// direction's scale, by columns; and, if gains is given, the product of the gains before it by rows.
template <typename T, int D>
void forward_chain(const Inputs<T>& in, int64_t b, int64_t r, int64_t h, T* contents, T* gains) {
  const Shape& s = in.shape;
  State<T, D> state;
  state.start(in, r, h, s.heads);
  alignas(64) T prefix[D * D], next[D * D], columns[D * D], rows[D * D];
  alignas(64) T x[kLanes * D], k[kLanes * D], delta[kLanes * D], log_alpha[kLanes], step[kLanes],
      pair[kLanes];
  const Factors<T> factors{log_alpha, step, pair};
  Matrix<T, D> gain;
  gain.set_identity();
  gain.store_to(prefix);
  typename Dim<T, D>::Row lambda[Dim<T, D>::parts];
  load_row<T, D>(lambda, in.scale + (r * s.heads + h) * D);

  const int64_t chunk = s.chunk(r), chunks = s.chunks(r);
  for (int64_t c = 0;; ++c) {
    for (int j = 0; j < D; ++j) {
      typename Dim<T, D>::Row column[Dim<T, D>::parts];
      load_row<T, D>(column, state.content + j * D);
      for (int p = 0; p < Dim<T, D>::parts; ++p) column[p] *= lambda[p];
      store_row<T, D>(contents + c * D * D + j * D, column);
    }
    if (gains) std::copy_n(prefix, D * D, gains + c * D * D);
    if (c == chunks - 1) return;  // nobody reads the memories after the last chunk

    gain.set_identity();
    for (int64_t done = 0; done < chunk; done += kLanes) {
      const int count = static_cast<int>(std::min<int64_t>(kLanes, chunk - done));
      int64_t stride;
      const Walk walk(s, in.z, b, r, h * D, c * chunk + done);
      const T* rows_of_x = tokens<T, D>(x, &stride, in.z, walk, count);
      TokenBlock<T, D> block;
      token_block<T, D>(block, state.generators, rows_of_x, stride, count);
      lanes_to_rows<T, D>(k, block.k);
      lanes_to_rows<T, D>(delta, block.delta);
      store<T, kLanes>(log_alpha, block.log_alpha);
      store<T, kLanes>(step, block.step);
      pair_dots<T, D>(pair, k, k);
      gain_block<T, D, false>(gain, k, delta, factors, (count + 1) & ~1, nullptr);
    }
    gain.store_to(columns);
    transpose<T, D>(rows, columns);
    state.advance(columns, rows);
    if (gains) {
      multiply<T, D>(next, prefix, rows);
      std::copy_n(next, D * D, prefix);
    }
  }
}

// One over the norm of 16 rows, as Equation 22 has it: not below 1e-12.
template <typename T, int D>
MVH_INLINE Vec<T, kLanes> inverse_norms(const T* rows) {
  const Vec<T, kLanes> norms = vsqrt<T, kLanes>(row_dots<T, D>(rows, rows));
  return T(1) / vmax(norms, splat<T, kLanes>(T(1e-12)));
}

// Adds up what each reader's routes have per chunk, in the table of its first.
template <typename T, int D>
void merge_tables(const Shape& s, const Readers& readers, T* tables) {
  for (int64_t n = 0; n < readers.count; ++n) {
    const Reader& reader = readers.reader[n];
    for (int64_t k = 1; k < reader.count; ++k)
      for (int64_t c = 0; c < reader.chunks; ++c) {
        T* into = tables + (reader.table + reader.mirrored(s, k, c)) * D * D;
        const T* from = tables + (s.first_chunk(reader.routes[k]) + c) * D * D;
        for (int64_t e = 0; e < D * D; ++e) into[e] += from[e];
      }
  }
}

// Pixels are read in tiles of kBand rows by kLanes columns, so that a row's memory serves all of a
// tile's columns from registers and a column's all of its rows.
constexpr int kBand = 4;
struct Tile {
  int64_t b, h, i, j, height, width;

  static Tile at(const Shape& s, int64_t b, int64_t h, int64_t i, int64_t j) {
    return {b, h, i, j, std::min<int64_t>(kBand, s.height - i), std::min<int64_t>(kLanes, s.width - j)};
  }
};
MVH_INLINE int64_t bands(const Shape& s) { return (s.height + kBand - 1) / kBand; }

template <typename T, int D>
using TileRows = T[kBand * kLanes * D];  // of pixel (i, j) of the tile at (i * kLanes + j) * D

// Tiles that the map ends in have zeros where they lack columns. Asks for the tile to the right.
template <typename T, int D>
MVH_INLINE void read_tile(T* rows, const Pixels& p, const Tile& tile) {
  for (int64_t i = 0; i < tile.height; ++i, rows += kLanes * D) {
    for (int64_t j = 0; j < tile.width; ++j) {
      const int64_t offset = p.offset(tile.b, tile.i + i, tile.j + j, tile.h * D);
      read_row<T, D>(rows + j * D, p, offset);
      p.prefetch(offset + kLanes * p.col);
    }
    std::fill(rows + tile.width * D, rows + kLanes * D, T(0));
  }
}

// out = sum over readers of M a, or of M^T a, as the tables' matrices are by columns or by rows.
template <typename T, int D>
MVH_INLINE void read_memories(T* out, const Shape& s, const Readers& readers, const T* tables,
                              const Tile& tile, const T* a) {
  constexpr int width = Dim<T, D>::width, parts = Dim<T, D>::parts;
  for (int64_t n = 0; n < readers.count; ++n) {
    const Reader& reader = readers.reader[n];
    const bool columns = s.by_columns(reader.routes[0]);
    const int64_t lines = columns ? tile.width : tile.height;
    const int64_t line = columns ? tile.height : tile.width;
    Matrix<T, D> memory = {};
    int64_t loaded = -1;
    for (int64_t outer = 0; outer < lines; ++outer)
      for (int64_t inner = 0; inner < line; ++inner) {
        const int64_t i = columns ? inner : outer, j = columns ? outer : inner;
        const int64_t c = reader.chunk_of(s, tile.i + i, tile.j + j);
        if (c != loaded) memory.load_from(tables + (reader.table + c) * D * D);
        loaded = c;
        const T* from = a + (i * kLanes + j) * D;
        T* into = out + (i * kLanes + j) * D;
        for (int p = 0; p < parts; ++p) {
          typename Dim<T, D>::Row acc[4] = {};
          if (n) acc[0] = load<T, width>(into + p * width);
          for (int e = 0; e < D; ++e) acc[e & 3] += from[e] * memory.v[e][p];
          store<T, width>(into + p * width, (acc[0] + acc[1]) + (acc[2] + acc[3]));
        }
      }
  }
}

// y of one head in a band of rows of image b (25, 26).
template <typename T, int D>
void forward_reads(const Inputs<T>& in, const Outputs<T>& out, const Readers& readers, int64_t b,
                   int64_t h, int64_t band, const T* tables) {
  const Shape& s = in.shape;
  constexpr int parts = Dim<T, D>::parts;
  typename Dim<T, D>::Row through[parts], y[parts], x[parts];
  load_row<T, D>(through, in.pass + h * D);
  alignas(64) TileRows<T, D> q, z, read;
  alignas(64) T inverse[kLanes];
  for (int64_t j = 0; j < s.width; j += kLanes) {
    const Tile tile = Tile::at(s, b, h, band * kBand, j);
    read_tile<T, D>(q, in.q, tile);
    read_tile<T, D>(z, in.z, tile);
    read_memories<T, D>(read, s, readers, tables, tile, q);
    for (int64_t i = 0; i < tile.height; ++i) {
      store<T, kLanes>(inverse, inverse_norms<T, D>(q + i * kLanes * D));
      for (int64_t t = 0; t < tile.width; ++t) {
        T* row = read + (i * kLanes + t) * D;
        load_row<T, D>(y, row);
        load_row<T, D>(x, z + (i * kLanes + t) * D);
        for (int p = 0; p < parts; ++p) y[p] = y[p] * inverse[t] + through[p] * x[p];
        store_row<T, D>(row, y);
        write_row<T, D>(out.y, out.y.offset(b, tile.i + i, j + t, h * D), row);
      }
    }
  }
}

template <typename T, int D>
void forward_dims(const Inputs<T>& in, const Outputs<T>& out, const Parallel& parallel) {
  const Shape& s = in.shape;
  const Readers readers(s);
  const int64_t units = s.batch * s.heads, all = s.first_chunk(s.routes), size = all * D * D;
  const auto chain = [&](int64_t n, int64_t r, T* tables) {
    const int64_t first = s.first_chunk(r) * D * D;
    forward_chain<T, D>(in, n / s.heads, r, n % s.heads, tables + first,
                        out.gains ? out.gains + n * size + first : nullptr);
  };
  const auto read = [&](int64_t n, int64_t band, const T* tables) {
    forward_reads<T, D>(in, out, readers, n / s.heads, n % s.heads, band, tables);
  };
  // A head of an image at a time if that is work for all threads: its tables stay in cache.
  if (parallel.fills(units)) {
    parallel.run(units, [&](int64_t begin, int64_t end) {
      FlushDenormals flush;
      const Buffer<T> tables(size);
      for (int64_t n = begin; n < end; ++n) {
        for (int64_t r = 0; r < s.routes; ++r) chain(n, r, tables.get());
        merge_tables<T, D>(s, readers, tables.get());
        for (int64_t band = 0; band < bands(s); ++band) read(n, band, tables.get());
      }
    });
    return;
  }
  const Buffer<T> buffer(units * size);
  const auto each = [&](int64_t tasks, auto&& task) {  // task(unit, which of its parts, its tables)
    parallel.run(units * tasks, [&](int64_t begin, int64_t end) {
      FlushDenormals flush;
      for (int64_t n = begin; n < end; ++n)
        task(n / tasks, n % tasks, buffer.get() + n / tasks * size);
    });
  };
  each(s.routes, chain);
  each(1, [&](int64_t, int64_t, T* tables) { merge_tables<T, D>(s, readers, tables); });
  each(bands(s), read);
}

// Gradients of the initial memories of one chain. Matrices by columns.
template <typename T, int D>
struct StateGradient {
  alignas(64) T content[D * D] = {}, key[D * D] = {}, value[D * D] = {}, rate[D] = {},
                retention[D] = {};
};

template <typename T, int D>
MVH_INLINE void add_to(T* out, const typename Dim<T, D>::Row* row) {
  constexpr int width = Dim<T, D>::width;
  for (int p = 0; p < Dim<T, D>::parts; ++p)
    store<T, width>(out + p * width, load<T, width>(out + p * width) + row[p]);
}

// out, by columns, += sum_t a_t b_t^T for rows a, b.
template <typename T, int D>
MVH_INLINE void add_outer(T* out, const T* a, const T* b, int64_t count) {
  using Row = typename Dim<T, D>::Row;
  constexpr int width = Dim<T, D>::width;
  for (int p = 0; p < Dim<T, D>::parts; ++p) {
    Row acc[D];
    for (int j = 0; j < D; ++j) acc[j] = load<T, width>(out + j * D + p * width);
    for (int64_t t = 0; t < count; ++t) {
      const Row row = load<T, width>(a + t * D + p * width);
      for (int j = 0; j < D; ++j) acc[j] += b[t * D + j] * row;
    }
    for (int j = 0; j < D; ++j) store<T, width>(out + j * D + p * width, acc[j]);
  }
}

// What the backward of one chain works with; sized for one chunk.
template <typename T, int D>
struct Workspace {
  int64_t padded;
  std::unique_ptr<TokenBlock<T, D>[]> blocks;
  Buffer<T> storage;
  T *x, *k, *delta, *u, *w, *v, *log_alpha, *step, *kk, *uw;

  Factors<T> factors(const T* pair, int64_t first) const {
    return {log_alpha + first, step + first, pair + first};
  }

  explicit Workspace(int64_t chunk)
      : padded((chunk + kLanes - 1) / kLanes * kLanes),
        blocks(new TokenBlock<T, D>[padded / kLanes]),
        storage(padded * (6 * D + 4)) {
    T* p = storage.get();
    for (T** array : {&x, &k, &delta, &u, &w, &v}) {
      *array = p;
      p += padded * D;
    }
    for (T** array : {&log_alpha, &step, &kk, &uw}) {
      *array = p;
      p += padded;
    }
    std::fill(u, v + padded * D, T(0));  // rows past the end of a chunk stay zero
  }
};

// The tokens of a chunk that another one follows: from the gradient of the memories at its end to
// that at its start, and of the tokens w.x, which w.u takes.
template <typename T, int D>
void backward_tokens(Workspace<T, D>& w, StateGradient<T, D>& grad, const Generators<T, D>& columns,
                     const T* content, const T* key, const T* value, int64_t count) {
  using Row = typename Dim<T, D>::Row;
  constexpr int parts = Dim<T, D>::parts;
  const int64_t blocks = (count + kLanes - 1) / kLanes;
  const auto even = [&](int64_t n) {
    return static_cast<int>((std::min<int64_t>(kLanes, count - n * kLanes) + 1) & ~1);
  };
  // D_C = dL / dG_C = sum over memories of M^T dM.
  Matrix<T, D> gain, adjoint, transposed;
  alignas(64) T buffer[D * D], gain_columns[D * D], gain_rows[D * D];
  Row rate[parts], retention[parts];
  load_row<T, D>(rate, columns.rate);
  load_row<T, D>(retention, columns.retention);
  for (int j = 0; j < D; ++j) {
    Row a[parts], b[parts], c[parts];
    combine<T, D>(a, content, grad.content + j * D);
    combine<T, D>(b, key, grad.key + j * D);
    combine<T, D>(c, value, grad.value + j * D);
    for (int p = 0; p < parts; ++p)
      adjoint.v[j][p] = a[p] + b[p] + c[p] + grad.rate[j] * rate[p] + grad.retention[j] * retention[p];
  }
  adjoint.store_to(buffer);

  gain.set_identity();
  for (int64_t n = 0; n < blocks; ++n) {
    const int64_t first = n * kLanes;
    TokenBlock<T, D>& block = w.blocks[n];
    token_block<T, D>(block, columns, w.x + first * D, D,
                      static_cast<int>(std::min<int64_t>(kLanes, count - first)));
    lanes_to_rows<T, D>(w.k + first * D, block.k);
    lanes_to_rows<T, D>(w.delta + first * D, block.delta);
    store<T, kLanes>(w.log_alpha + first, block.log_alpha);
    store<T, kLanes>(w.step + first, block.step);
    pair_dots<T, D>(w.kk + first, w.k + first * D, w.k + first * D);
    gain_block<T, D, false>(gain, w.k + first * D, w.delta + first * D, w.factors(w.kk, first),
                            even(n), w.u + first * D);
  }
  gain.store_to(gain_columns);

  for (int64_t n = blocks - 1; n >= 0; --n) {
    const int64_t first = n * kLanes;
    gain_block<T, D, true>(adjoint, w.k + first * D, nullptr, w.factors(w.kk, first), even(n),
                           w.w + first * D);
    pair_dots<T, D>(w.uw + first, w.u + first * D, w.w + first * D);
  }
  T carry = 0;  // <G_0, D_0>, the trace of D_0
  for (int j = 0; j < D; ++j) carry += adjoint.v[j][j / Dim<T, D>::width][j % Dim<T, D>::width];
  transposed.set_identity();
  for (int64_t n = 0; n < blocks; ++n) {
    const int64_t first = n * kLanes;
    transposed_block<T, D, false, false>(transposed, w.k + first * D, w.u + first * D, w.w + first * D,
                                  w.factors(w.uw, first), even(n), w.v + first * D);
  }
  transpose<T, D>(gain_rows, buffer);
  transposed.load_from(gain_rows);
  for (int64_t n = blocks - 1; n >= 0; --n) {
    const int64_t first = n * kLanes;
    transposed_block<T, D, true, true>(transposed, w.k + first * D, w.w + first * D, w.u + first * D,
                                 w.factors(w.uw, first), even(n), w.v + first * D);
  }

  // dM_b = dM_C G^T + what the tokens' quantities add.
  transpose<T, D>(gain_rows, gain_columns);
  for (T* m : {grad.content, grad.key, grad.value}) multiply<T, D>(m, gain_rows, m);
  for (T* m : {grad.rate, grad.retention}) {
    Row row[parts];
    combine<T, D>(row, gain_columns, m);
    store_row<T, D>(m, row);
  }

  Row grad_rate[2][parts] = {}, grad_retention[2][parts] = {};  // of even and of odd tokens
  alignas(64) T scalar[2][kLanes];
  for (int64_t n = 0; n < blocks; ++n) {
    const int64_t first = n * kLanes;
    TokenGradient<T, D> g;
    token_gradient<T, D>(g, w.blocks[n], w.u + first * D, w.w + first * D, w.v + first * D, carry);
    // k, delta and u are done with: they take the gradients of keys, values and tokens.
    lanes_to_rows<T, D>(w.k + first * D, g.key);
    lanes_to_rows<T, D>(w.delta + first * D, g.value);
    store<T, kLanes>(scalar[0], g.rate);
    store<T, kLanes>(scalar[1], g.retention);
    for (int t = 0; t < kLanes; ++t) {
      Row x[parts];
      load_row<T, D>(x, w.x + (first + t) * D);
      for (int p = 0; p < parts; ++p) {
        grad_rate[t & 1][p] += scalar[0][t] * x[p];
        grad_retention[t & 1][p] += scalar[1][t] * x[p];
      }
    }
    Vec<T, kLanes> dx[D], through_value[D];
    project<T, D>(dx, key, g.key);
    project<T, D>(through_value, value, g.value);
    for (int j = 0; j < D; ++j)
      dx[j] += through_value[j] + columns.rate[j] * g.rate + columns.retention[j] * g.retention;
    lanes_to_rows<T, D>(w.u + first * D, dx);
  }
  for (int n = 0; n < 2; ++n) {
    add_to<T, D>(grad.rate, grad_rate[n]);
    add_to<T, D>(grad.retention, grad_retention[n]);
  }
  add_outer<T, D>(grad.key, w.k, w.x, count);
  add_outer<T, D>(grad.value, w.delta, w.x, count);
}

// The backward of one head of one image, in steps of independent tasks.
template <typename T, int D>
struct BackwardHead {
  const Inputs<T>& in;
  const Gradients<T>& out;
  const Readers& readers;
  int64_t b, h;
  T* contents;   // of every chunk of every route, by rows
  T* tables;     // what readers read, by rows; then what read: sum_t dy_t q_t^T / |q_t|, by columns
  T* dz;         // (slots, H, W, d)
  int64_t slots;  // one for each route, or a single one that they add to in turn

  using Row = typename Dim<T, D>::Row;
  static constexpr int parts = Dim<T, D>::parts, square = D * D;

  // Values, aligned: contents, tables and dz.
  static int64_t workspace(const Shape& s, int64_t slots) {
    return 2 * s.first_chunk(s.routes) * square + slots * s.tokens() * D;
  }
  BackwardHead(const Inputs<T>& in, const Gradients<T>& out, const Readers& readers, int64_t unit,
               T* buffer, int64_t slots)
      : in(in), out(out), readers(readers), b(unit / in.shape.heads), h(unit % in.shape.heads),
        contents(buffer), tables(buffer + in.shape.first_chunk(in.shape.routes) * square),
        dz(tables + in.shape.first_chunk(in.shape.routes) * square), slots(slots) {}

  int64_t head(int64_t r) const { return (r * in.shape.heads + h) * D; }
  const T* gains(int64_t r) const {
    const Shape& s = in.shape;
    return out.gains + ((b * s.heads + h) * s.first_chunk(s.routes) + s.first_chunk(r)) * square;
  }

  // The memories are the initial ones times the product of the gains (B.4).
  void memories(int64_t r) const {
    const int64_t first = in.shape.first_chunk(r);
    for (int64_t c = 0; c < in.shape.chunks(r); ++c) {
      const T* scale = in.scale + head(r);
      T* content = contents + (first + c) * square;
      T* scaled = tables + (first + c) * square;
      multiply<T, D>(content, in.content + head(r) * D, gains(r) + c * square);
      for (int e = 0; e < D; ++e)
        for (int j = 0; j < D; ++j) scaled[e * D + j] = scale[e] * content[e * D + j];
    }
  }

  void merge() const { merge_tables<T, D>(in.shape, readers, tables); }

  // dq of a band of rows: of M q / |q| for the sum M of the memories.
  void queries(int64_t band) const {
    const Shape& s = in.shape;
    alignas(64) TileRows<T, D> q, dy, read;
    alignas(64) T inverse[kLanes];
    for (int64_t j = 0; j < s.width; j += kLanes) {
      const Tile tile = Tile::at(s, b, h, band * kBand, j);
      read_tile<T, D>(q, in.q, tile);
      read_tile<T, D>(dy, out.dy, tile);
      read_memories<T, D>(read, s, readers, tables, tile, dy);
      for (int64_t i = 0; i < tile.height; ++i) {
        const T* rows = q + i * kLanes * D;
        const Vec<T, kLanes> norms = inverse_norms<T, D>(rows);
        // Along q nothing changes, except below the least norm, which is a constant.
        const Vec<T, kLanes> along =
            norms < T(1e12) ? row_dots<T, D>(rows, read + i * kLanes * D) * (norms * norms) : Vec<T, kLanes>{};
        store<T, kLanes>(inverse, norms);
        for (int64_t t = 0; t < tile.width; ++t) {
          T* row = read + (i * kLanes + t) * D;
          Row g[parts], n[parts];
          load_row<T, D>(g, row);
          load_row<T, D>(n, rows + t * D);
          for (int p = 0; p < parts; ++p) g[p] = inverse[t] * (g[p] - along[t] * n[p]);
          store_row<T, D>(row, g);
          write_row<T, D>(out.dq, out.dq.offset(b, tile.i + i, j + t, h * D), row);
        }
      }
    }
  }

  // What the tokens of chunk c of reader n read, in the place of its memory.
  void collect(int64_t n, int64_t c) const {
    const Shape& s = in.shape;
    const Reader& reader = readers.reader[n];
    alignas(64) T q[kLanes * D], dy[kLanes * D], inverse[kLanes], sum[square] = {};
    const int64_t end = std::min((c + 1) * reader.chunk, s.tokens());
    for (int64_t first = c * reader.chunk; first < end; first += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, end - first);
      gather<T, D>(q, in.q, Walk(s, in.q, b, reader.routes[0], h * D, first), count);
      gather<T, D>(dy, out.dy, Walk(s, out.dy, b, reader.routes[0], h * D, first), count);
      store<T, kLanes>(inverse, inverse_norms<T, D>(q));
      for (int64_t t = 0; t < count; ++t) {
        Row row[parts];
        load_row<T, D>(row, dy + t * D);
        for (int p = 0; p < parts; ++p) row[p] *= inverse[t];
        store_row<T, D>(dy + t * D, row);
      }
      add_outer<T, D>(sum, dy, q, count);
    }
    std::copy_n(sum, square, tables + (reader.table + c) * square);
  }

  // The gradient of what route r read at chunk c.
  const T* reads(int64_t r, int64_t c) const {
    for (int64_t n = 0; n < readers.count; ++n)
      for (int64_t k = 0; k < readers.reader[n].count; ++k)
        if (readers.reader[n].routes[k] == r)
          return tables +
                 (readers.reader[n].table + readers.reader[n].mirrored(in.shape, k, c)) * square;
    return nullptr;  // every route has its reader
  }

  // The chain of route r: gradients of its memories and scale, and its share of dz.
  void chain(int64_t r) const {
    const Shape& s = in.shape;
    const int64_t chunk = s.chunk(r), chunks = s.chunks(r);
    const bool add = slots == 1 && r > 0;
    T* share = dz + (slots == 1 ? 0 : r) * s.tokens() * D;
    const Pixels map{share, own_type<T>, sizeof(T), 0, s.width * D, D, 1};
    Workspace<T, D> w(chunk);
    StateGradient<T, D> grad;
    alignas(64) T key[square], value[square], columns[square];
    Generators<T, D> generators;
    Row lambda[parts], grad_lambda[parts] = {};
    load_row<T, D>(lambda, in.scale + head(r));

    for (int64_t c = chunks - 1; c >= 0; --c) {
      const int64_t first = c * chunk, count = std::min(chunk, s.tokens() - first);
      const T* content = contents + (s.first_chunk(r) + c) * square;
      if (c < chunks - 1) {
        const T* prefix = gains(r) + c * square;
        multiply<T, D>(key, in.key + head(r) * D, prefix);
        multiply<T, D>(value, in.value + head(r) * D, prefix);
        transpose<T, D>(generators.key, key);
        transpose<T, D>(generators.value, value);
        Row row[parts];
        combine<T, D>(row, prefix, in.rate + head(r));
        store_row<T, D>(generators.rate, row);
        combine<T, D>(row, prefix, in.retention + head(r));
        store_row<T, D>(generators.retention, row);
        gather<T, D>(w.x, in.z, Walk(s, in.z, b, r, h * D, first), count);
        backward_tokens<T, D>(w, grad, generators, content, key, value, count);
      } else {
        std::fill_n(w.u, count * D, T(0));  // nobody reads what they did
      }
      Walk walk(s, map, 0, r, 0, first);
      for (int64_t t = 0; t < count; ++t, walk.advance()) {
        T* into = share + walk.offset;
        Row row[parts];
        load_row<T, D>(row, w.u + t * D);
        if (add) add_to<T, D>(into, row);
        else store_row<T, D>(into, row);
      }

      transpose<T, D>(columns, content);
      const T* read = reads(r, c);
      for (int j = 0; j < D; ++j) {
        Row e[parts], column[parts];
        load_row<T, D>(e, read + j * D);
        load_row<T, D>(column, columns + j * D);
        for (int p = 0; p < parts; ++p) {
          grad_lambda[p] += e[p] * column[p];
          e[p] *= lambda[p];
        }
        add_to<T, D>(grad.content + j * D, e);
      }
    }
    const int64_t n = (b * s.routes + r) * s.heads + h;
    store_row<T, D>(out.scale + n * D, grad_lambda);
    transpose<T, D>(out.content + n * square, grad.content);
    transpose<T, D>(out.key + n * square, grad.key);
    transpose<T, D>(out.value + n * square, grad.value);
    std::copy_n(grad.rate, D, out.rate + n * D);
    std::copy_n(grad.retention, D, out.retention + n * D);
  }

  // dz of row i: of the routes in their order, and of the skip connection.
  void inputs(int64_t i) const {
    const Shape& s = in.shape;
    const T* pass = in.pass + h * D;
    alignas(64) T dy[D], sum[D];
    for (int64_t j = 0; j < s.width; ++j) {
      read_row<T, D>(dy, out.dy, out.dy.offset(b, i, j, h * D));
      const T* from = dz + (i * s.width + j) * D;
      std::copy_n(from, D, sum);
      for (int64_t slot = 1; slot < slots; ++slot)
        for (int e = 0; e < D; ++e) sum[e] += from[slot * s.tokens() * D + e];
      for (int e = 0; e < D; ++e) sum[e] += pass[e] * dy[e];
      write_row<T, D>(out.dz, out.dz.offset(b, i, j, h * D), sum);
    }
  }
};

template <typename T, int D>
void backward_dims(const Inputs<T>& in, const Gradients<T>& out, const Parallel& parallel) {
  using Head = BackwardHead<T, D>;
  const Shape& s = in.shape;
  const Readers readers(s);
  const int64_t units = s.batch * s.heads;
  // As in the forward.
  if (parallel.fills(units)) {
    parallel.run(units, [&](int64_t begin, int64_t end) {
      FlushDenormals flush;
      const Buffer<T> buffer(Head::workspace(s, 1));
      for (int64_t n = begin; n < end; ++n) {
        const Head head(in, out, readers, n, buffer.get(), 1);
        for (int64_t r = 0; r < s.routes; ++r) head.memories(r);
        head.merge();
        for (int64_t band = 0; band < bands(s); ++band) head.queries(band);
        for (int64_t k = 0; k < readers.count; ++k)
          for (int64_t c = 0; c < readers.reader[k].chunks; ++c) head.collect(k, c);
        for (int64_t r = 0; r < s.routes; ++r) head.chain(r);
        for (int64_t i = 0; i < s.height; ++i) head.inputs(i);
      }
    });
    return;
  }
  const int64_t size = Head::workspace(s, s.routes);
  const Buffer<T> buffer(units * size);
  const auto each = [&](int64_t tasks, auto&& task) {  // task(head, which of its parts)
    parallel.run(units * tasks, [&](int64_t begin, int64_t end) {
      FlushDenormals flush;
      for (int64_t n = begin; n < end; ++n)
        task(Head(in, out, readers, n / tasks, buffer.get() + n / tasks * size, s.routes), n % tasks);
    });
  };
  each(s.routes, [](const Head& head, int64_t r) { head.memories(r); });
  each(1, [](const Head& head, int64_t) { head.merge(); });
  each(bands(s), [](const Head& head, int64_t band) { head.queries(band); });
  for (int64_t k = 0; k < readers.count; ++k)
    each(readers.reader[k].chunks, [k](const Head& head, int64_t c) { head.collect(k, c); });
  each(s.routes, [](const Head& head, int64_t r) { head.chain(r); });
  each(s.height, [](const Head& head, int64_t i) { head.inputs(i); });
}

// The head dimensions there are kernels for; the op asks for no other.
#define MVH_FOR_DIMS(function, dims, ...)                 \
  switch (dims) {                                         \
    case 4: return function<4>(__VA_ARGS__);              \
    case 8: return function<8>(__VA_ARGS__);              \
    case 16: return function<16>(__VA_ARGS__);            \
    case 32: return function<32>(__VA_ARGS__);            \
    case 64: return function<64>(__VA_ARGS__);            \
  }

template <typename T>
struct Kernel {
  template <int D>
  static void forward(const Inputs<T>& in, const Outputs<T>& out, const Parallel& f) {
    forward_dims<T, D>(in, out, f);
  }
  template <int D>
  static void backward(const Inputs<T>& in, const Gradients<T>& out, const Parallel& f) {
    backward_dims<T, D>(in, out, f);
  }
};

#define MVH_DEFINE_KERNELS(T)                                                              \
  void forward(const Inputs<T>& in, const Outputs<T>& out, const Parallel& f) {         \
    MVH_FOR_DIMS(Kernel<T>::template forward, in.shape.dims, in, out, f)                   \
  }                                                                                        \
  void backward(const Inputs<T>& in, const Gradients<T>& out, const Parallel& f) {      \
    MVH_FOR_DIMS(Kernel<T>::template backward, in.shape.dims, in, out, f)                  \
  }

}  // namespace mvh::MVH_ISA

// The directional scan of a feature map: chunks of every direction, reads, and their adjoints.
//
// Each instruction set compiles this in a namespace of its own, MVH_ISA, or the linker would take
// one set's code for all.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernel.h"
#include "srnl.h"

namespace mvh::MVH_ISA {

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
MVH_INLINE void read_row(T* out, const Pixels& p, int64_t b, int64_t i, int64_t j, int64_t c) {
  with_type<T>(p.type, [&](auto* type) {
    const auto* in = static_cast<const std::remove_pointer_t<decltype(type)>*>(p.data) +
                     p.offset(b, i, j, c);
    if (p.channel == 1)
      for (int e = 0; e < D; ++e) out[e] = static_cast<T>(in[e]);
    else
      for (int e = 0; e < D; ++e) out[e] = static_cast<T>(in[e * p.channel]);
  });
}

template <typename T>
MVH_INLINE void write(const Pixels& p, int64_t b, int64_t i, int64_t j, int64_t c, const T* in,
                      int64_t count) {
  with_type<T>(p.type, [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    E* out = static_cast<E*>(p.data) + p.offset(b, i, j, c);
    for (int64_t e = 0; e < count; ++e) out[e * p.channel] = static_cast<E>(in[e]);
  });
}

// The pixel of token t of direction r.
struct Position {
  int64_t i, j;
};
MVH_INLINE Position position(const Shape& s, int64_t r, int64_t t) {
  const int64_t u = s.reversed(r) ? s.tokens() - 1 - t : t;
  return s.by_columns(r) ? Position{u % s.height, u / s.height} : Position{u / s.width, u % s.width};
}

// Tokens first .. first + count - 1 of direction r as rows, zeros up to a multiple of kLanes.
template <typename T, int D>
MVH_INLINE void gather(T* rows, const Shape& s, const Pixels& z, int64_t b, int64_t r,
                       int64_t h, int64_t first, int64_t count) {
  Position at = position(s, r, first);
  const int64_t step = s.reversed(r) ? -1 : 1;
  for (int64_t t = 0; t < count; ++t) {
    read_row<T, D>(rows + t * D, z, b, at.i, at.j, h * D);
    if (s.by_columns(r)) {
      at.i += step;
      if (at.i == s.height || at.i < 0) at = {at.i < 0 ? s.height - 1 : 0, at.j + step};
    } else {
      at.j += step;
      if (at.j == s.width || at.j < 0) at = {at.i + step, at.j < 0 ? s.width - 1 : 0};
    }
  }
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  std::fill(rows + count * D, rows + padded * D, T(0));
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
    alignas(64) T next[D * D];
    for (T* m : {content, generators.key, generators.value}) {
      multiply<T, D>(next, columns, m);
      std::copy_n(next, D * D, m);
    }
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
  alignas(64) T x[kLanes * D], k[kLanes * D], delta[kLanes * D], log_alpha[kLanes], step[kLanes];
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
      gather<T, D>(x, s, in.z, b, r, h, c * chunk + done, count);
      TokenBlock<T, D> block;
      token_block<T, D>(block, state.generators, x, count);
      lanes_to_rows<T, D>(k, block.k);
      lanes_to_rows<T, D>(delta, block.delta);
      store<T, kLanes>(log_alpha, block.log_alpha);
      store<T, kLanes>(step, block.step);
      gain_block<T, D, false>(gain, k, delta, log_alpha, step, (count + 1) & ~1, nullptr);
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

template <typename T, int D>
void forward_dims(const Inputs<T>& in, const Outputs<T>& out, const ParallelFor& parallel_for) {
  const Shape& s = in.shape;
  const int64_t all = s.first_chunk(s.routes), square = D * D;
  std::unique_ptr<T[]> contents(new T[s.batch * s.heads * all * square]);
  const auto table = [&](int64_t b, int64_t h, int64_t r) {
    return contents.get() + ((b * s.heads + h) * all + s.first_chunk(r)) * square;
  };
  parallel_for(s.batch * s.routes * s.heads, [&](int64_t begin, int64_t end) {
    FlushDenormals flush;
    for (int64_t n = begin; n < end; ++n) {
      const int64_t h = n % s.heads, r = n / s.heads % s.routes, b = n / s.heads / s.routes;
      T* gains = out.gains;
      if (gains) gains += ((b * s.heads + h) * all + s.first_chunk(r)) * square;
      forward_chain<T, D>(in, b, r, h, table(b, h, r), gains);
    }
  });

  // With aligned chunks the directions of a row are read as one, and those of a column.
  const bool aligned = s.aligned();
  int64_t row_table = -1, col_table = -1;
  if (aligned) {
    for (int64_t r = 0; r < s.routes; ++r) {
      int64_t& first = s.by_columns(r) ? col_table : row_table;
      if (first < 0) first = r;
    }
    parallel_for(s.batch * s.heads, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        for (int64_t r = 0; r < s.routes; ++r) {
          const int64_t first = s.by_columns(r) ? col_table : row_table;
          if (r == first) continue;
          T* into = table(n / s.heads, n % s.heads, first);
          const T* from = table(n / s.heads, n % s.heads, r);
          const int64_t chunks = s.chunks(r);
          for (int64_t c = 0; c < chunks; ++c) {
            const int64_t mirrored = s.reversed(r) == s.reversed(first) ? c : chunks - 1 - c;
            for (int64_t e = 0; e < square; ++e)
              into[mirrored * square + e] += from[c * square + e];
          }
        }
    });
  }

  parallel_for(s.batch * s.heads * s.height, [&](int64_t begin, int64_t end) {
    FlushDenormals flush;
    using Row = typename Dim<T, D>::Row;
    constexpr int parts = Dim<T, D>::parts;
    for (int64_t n = begin; n < end; ++n) {
      const int64_t i = n % s.height, h = n / s.height % s.heads, b = n / s.height / s.heads;
      Row through[parts];
      load_row<T, D>(through, in.pass + h * D);
      for (int64_t j = 0; j < s.width; ++j) {
        alignas(64) T x[D], qs[D];
        read_row<T, D>(x, in.z, b, i, j, h * D);
        read_row<T, D>(qs, in.q, b, i, j, h * D);
        T square_norm = 0;
        for (int e = 0; e < D; ++e) square_norm += qs[e] * qs[e];
        const T inverse = T(1) / std::max(std::sqrt(square_norm), T(1e-12));
        Row acc[parts] = {}, token[parts];
        const auto add = [&](const T* columns) {
          Row product[parts];
          combine<T, D>(product, columns, qs);
          for (int p = 0; p < parts; ++p) acc[p] += product[p];
        };
        if (aligned) {
          if (row_table >= 0)
            add(table(b, h, row_table) + (s.reversed(row_table) ? s.height - 1 - i : i) * square);
          if (col_table >= 0)
            add(table(b, h, col_table) + (s.reversed(col_table) ? s.width - 1 - j : j) * square);
        } else {
          for (int64_t r = 0; r < s.routes; ++r) {
            const int64_t u = s.by_columns(r) ? j * s.height + i : i * s.width + j;
            const int64_t t = s.reversed(r) ? s.tokens() - 1 - u : u;
            add(table(b, h, r) + t / s.chunk(r) * square);
          }
        }
        load_row<T, D>(token, x);
        for (int p = 0; p < parts; ++p) acc[p] = acc[p] * inverse + through[p] * token[p];
        store_row<T, D>(x, acc);
        write<T>(out.y, b, i, j, h * D, x, D);
      }
    }
  });
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
  std::vector<T> storage;
  T *x, *k, *delta, *u, *w, *v, *gk, *gv, *log_alpha, *step;

  explicit Workspace(int64_t chunk) : padded((chunk + kLanes - 1) / kLanes * kLanes) {
    blocks.reset(new TokenBlock<T, D>[padded / kLanes]);
    storage.resize(padded * (8 * D + 2));
    T* p = storage.data();
    for (T** array : {&x, &k, &delta, &u, &w, &v, &gk, &gv}) {
      *array = p;
      p += padded * D;
    }
    log_alpha = p;
    step = p + padded;
  }
};

// The tokens of a chunk that another one follows: from the gradient of the memories at its end to
// that at its start, and of its tokens in w.x.
template <typename T, int D>
void backward_tokens(Workspace<T, D>& w, StateGradient<T, D>& grad, const Generators<T, D>& columns,
                     const T* content, const T* key, const T* value, int64_t count) {
  using Row = typename Dim<T, D>::Row;
  constexpr int parts = Dim<T, D>::parts;
  const int64_t blocks = (count + kLanes - 1) / kLanes;
  const auto even = [&](int64_t n) {
    return static_cast<int>((std::min<int64_t>(kLanes, count - n * kLanes) + 1) & ~1);
  };
  std::fill(w.u, w.gk, T(0));  // u, w and v: rows past the end stay zero

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
    token_block<T, D>(block, columns, w.x + first * D,
                      static_cast<int>(std::min<int64_t>(kLanes, count - first)));
    lanes_to_rows<T, D>(w.k + first * D, block.k);
    lanes_to_rows<T, D>(w.delta + first * D, block.delta);
    store<T, kLanes>(w.log_alpha + first, block.log_alpha);
    store<T, kLanes>(w.step + first, block.step);
    gain_block<T, D, false>(gain, w.k + first * D, w.delta + first * D, w.log_alpha + first,
                            w.step + first, even(n), w.u + first * D);
  }
  gain.store_to(gain_columns);

  for (int64_t n = blocks - 1; n >= 0; --n) {
    const int64_t first = n * kLanes;
    gain_block<T, D, true>(adjoint, w.k + first * D, nullptr, w.log_alpha + first, w.step + first,
                           even(n), w.w + first * D);
  }
  T carry = 0;  // <G_0, D_0>, the trace of D_0
  for (int j = 0; j < D; ++j) carry += adjoint.v[j][j / Dim<T, D>::width][j % Dim<T, D>::width];
  transposed.set_identity();
  for (int64_t n = 0; n < blocks; ++n) {
    const int64_t first = n * kLanes;
    transposed_block<T, D, false>(transposed, w.k + first * D, w.u + first * D, w.w + first * D,
                                  w.log_alpha + first, w.step + first, even(n), w.v + first * D);
  }
  transpose<T, D>(gain_rows, buffer);
  transposed.load_from(gain_rows);
  for (int64_t n = blocks - 1; n >= 0; --n) {
    const int64_t first = n * kLanes;
    transposed_block<T, D, true>(transposed, w.k + first * D, w.w + first * D, w.u + first * D,
                                 w.log_alpha + first, w.step + first, even(n), w.v + first * D);
  }

  // dM_b = dM_C G^T + what the tokens' quantities add.
  transpose<T, D>(gain_rows, gain_columns);
  for (T* m : {grad.content, grad.key, grad.value}) {
    multiply<T, D>(buffer, gain_rows, m);
    std::copy_n(buffer, D * D, m);
  }
  for (T* m : {grad.rate, grad.retention}) {
    Row row[parts];
    combine<T, D>(row, gain_columns, m);
    store_row<T, D>(m, row);
  }

  Row grad_rate[parts] = {}, grad_retention[parts] = {};
  alignas(64) T scalar[2][kLanes];
  for (int64_t n = 0; n < blocks; ++n) {
    const int64_t first = n * kLanes;
    TokenGradient<T, D> g;
    token_gradient<T, D>(g, w.blocks[n], w.u + first * D, w.w + first * D, w.v + first * D, carry);
    lanes_to_rows<T, D>(w.gk + first * D, g.key);
    lanes_to_rows<T, D>(w.gv + first * D, g.value);
    store<T, kLanes>(scalar[0], g.rate);
    store<T, kLanes>(scalar[1], g.retention);
    for (int t = 0; t < kLanes; ++t) {
      Row x[parts];
      load_row<T, D>(x, w.x + (first + t) * D);
      for (int p = 0; p < parts; ++p) {
        grad_rate[p] += scalar[0][t] * x[p];
        grad_retention[p] += scalar[1][t] * x[p];
      }
    }
    Vec<T, kLanes> dx[D], through_value[D];
    project<T, D>(dx, key, g.key);
    project<T, D>(through_value, value, g.value);
    for (int j = 0; j < D; ++j)
      dx[j] += through_value[j] + columns.rate[j] * g.rate + columns.retention[j] * g.retention;
    lanes_to_rows<T, D>(w.u + first * D, dx);  // u is done with: it takes the tokens' gradient
  }
  add_to<T, D>(grad.rate, grad_rate);
  add_to<T, D>(grad.retention, grad_retention);
  add_outer<T, D>(grad.key, w.gk, w.x, count);
  add_outer<T, D>(grad.value, w.gv, w.x, count);
}

// Gradients of one chain. dz and dq are those of its direction: (B, H, W, nh * d), contiguous.
template <typename T, int D>
void backward_chain(const Inputs<T>& in, const Gradients<T>& out, int64_t b, int64_t r, int64_t h,
                    const T* gains, T* dz, T* dq, StateGradient<T, D>& grad, T* grad_scale) {
  const Shape& s = in.shape;
  using Row = typename Dim<T, D>::Row;
  constexpr int parts = Dim<T, D>::parts;
  const int64_t chunk = std::min(s.chunk(r), s.tokens()), chunks = s.chunks(r);
  const int64_t head = (r * s.heads + h) * D;
  Workspace<T, D> w(chunk);
  alignas(64) T content[D * D], key[D * D], value[D * D], content_columns[D * D];
  Generators<T, D> columns;
  Row lambda[parts], grad_lambda[parts] = {};
  load_row<T, D>(lambda, in.scale + head);

  for (int64_t c = chunks - 1; c >= 0; --c) {
    const int64_t first = c * s.chunk(r), count = std::min(chunk, s.tokens() - first);
    const T* prefix = gains + c * D * D;  // the memories are the initial ones times this (B.4)
    multiply<T, D>(content, in.content + head * D, prefix);
    transpose<T, D>(content_columns, content);
    const auto row_of = [&](T* map, Position at) {
      return map + (((b * s.height + at.i) * s.width + at.j) * s.heads + h) * D;
    };
    const auto each = [&](auto&& visit) {
      for (int64_t t = 0; t < count; ++t) visit(t, position(s, r, first + t));
    };
    if (c < chunks - 1) {
      multiply<T, D>(key, in.key + head * D, prefix);
      multiply<T, D>(value, in.value + head * D, prefix);
      transpose<T, D>(columns.key, key);
      transpose<T, D>(columns.value, value);
      Row row[parts];
      combine<T, D>(row, prefix, in.rate + head);
      store_row<T, D>(columns.rate, row);
      combine<T, D>(row, prefix, in.retention + head);
      store_row<T, D>(columns.retention, row);
      gather<T, D>(w.x, s, in.z, b, r, h, first, count);
      backward_tokens<T, D>(w, grad, columns, content, key, value, count);
      each([&](int64_t t, Position at) { std::copy_n(w.u + t * D, D, row_of(dz, at)); });
    } else {
      each([&](int64_t, Position at) { std::fill_n(row_of(dz, at), D, T(0)); });
    }

    // Reads: y = scale * (M q / |q|).
    gather<T, D>(w.x, s, in.q, b, r, h, first, count);
    gather<T, D>(w.k, s, out.dy, b, r, h, first, count);
    each([&](int64_t t, Position at) {
      T* query = w.x + t * D;
      Row d[parts], g[parts], n[parts];
      load_row<T, D>(d, w.k + t * D);
      T norm = 0;
      for (int e = 0; e < D; ++e) norm += query[e] * query[e];
      norm = std::sqrt(norm);
      const T inverse = T(1) / std::max(norm, T(1e-12));
      load_row<T, D>(n, query);
      for (int p = 0; p < parts; ++p) {
        n[p] *= inverse;
        d[p] *= lambda[p];
      }
      store_row<T, D>(query, n);
      alignas(64) T scaled[D], back[D];
      store_row<T, D>(scaled, d);
      combine<T, D>(g, content, scaled);
      store_row<T, D>(back, g);
      T along = 0;
      for (int e = 0; e < D; ++e) along += back[e] * query[e];
      if (norm <= T(1e-12)) along = 0;
      for (int p = 0; p < parts; ++p) g[p] = inverse * (g[p] - along * n[p]);
      store_row<T, D>(row_of(dq, at), g);
    });
    alignas(64) T outer[D * D] = {};
    add_outer<T, D>(outer, w.k, w.x, count);
    for (int j = 0; j < D; ++j) {
      Row e[parts], column[parts];
      load_row<T, D>(e, outer + j * D);
      load_row<T, D>(column, content_columns + j * D);
      for (int p = 0; p < parts; ++p) {
        grad_lambda[p] += e[p] * column[p];
        e[p] *= lambda[p];
      }
      add_to<T, D>(grad.content + j * D, e);
    }
  }
  store_row<T, D>(grad_scale, grad_lambda);
}

template <typename T, int D>
void backward_dims(const Inputs<T>& in, const Gradients<T>& out, const ParallelFor& parallel_for) {
  const Shape& s = in.shape;
  const int64_t all = s.first_chunk(s.routes), width = s.heads * D;
  const int64_t map = s.batch * s.tokens() * width;
  std::unique_ptr<T[]> parts_z(new T[s.routes * map]), parts_q(new T[s.routes * map]);
  parallel_for(s.batch * s.routes * s.heads, [&](int64_t begin, int64_t end) {
    FlushDenormals flush;
    for (int64_t n = begin; n < end; ++n) {
      const int64_t h = n % s.heads, r = n / s.heads % s.routes, b = n / s.heads / s.routes;
      const T* gains = out.gains + ((b * s.heads + h) * all + s.first_chunk(r)) * D * D;
      StateGradient<T, D> grad;
      backward_chain<T, D>(in, out, b, r, h, gains, parts_z.get() + r * map,
                           parts_q.get() + r * map, grad, out.scale + n * D);
      transpose<T, D>(out.content + n * D * D, grad.content);
      transpose<T, D>(out.key + n * D * D, grad.key);
      transpose<T, D>(out.value + n * D * D, grad.value);
      std::copy_n(grad.rate, D, out.rate + n * D);
      std::copy_n(grad.retention, D, out.retention + n * D);
    }
  });

  // Directions in their order, whatever thread computed them; then the skip connection.
  parallel_for(s.batch * s.height, [&](int64_t begin, int64_t end) {
    FlushDenormals flush;
    std::vector<T> sum_z(width), sum_q(width), dy(width);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t b = n / s.height, i = n % s.height;
      for (int64_t j = 0; j < s.width; ++j) {
        const int64_t offset = (n * s.width + j) * width;
        for (int64_t h = 0; h < s.heads; ++h)
          read_row<T, D>(dy.data() + h * D, out.dy, b, i, j, h * D);
        for (int64_t e = 0; e < width; ++e) {
          sum_z[e] = in.pass[e] * dy[e];
          sum_q[e] = 0;
        }
        for (int64_t r = 0; r < s.routes; ++r)
          for (int64_t e = 0; e < width; ++e) {
            sum_z[e] += parts_z[r * map + offset + e];
            sum_q[e] += parts_q[r * map + offset + e];
          }
        write<T>(out.dz, b, i, j, 0, sum_z.data(), width);
        write<T>(out.dq, b, i, j, 0, sum_q.data(), width);
      }
    }
  });
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
  static void forward(const Inputs<T>& in, const Outputs<T>& out, const ParallelFor& f) {
    forward_dims<T, D>(in, out, f);
  }
  template <int D>
  static void backward(const Inputs<T>& in, const Gradients<T>& out, const ParallelFor& f) {
    backward_dims<T, D>(in, out, f);
  }
};

#define MVH_DEFINE_KERNELS(T)                                                              \
  void forward(const Inputs<T>& in, const Outputs<T>& out, const ParallelFor& f) {         \
    MVH_FOR_DIMS(Kernel<T>::template forward, in.shape.dims, in, out, f)                   \
  }                                                                                        \
  void backward(const Inputs<T>& in, const Gradients<T>& out, const ParallelFor& f) {      \
    MVH_FOR_DIMS(Kernel<T>::template backward, in.shape.dims, in, out, f)                  \
  }

}  // namespace mvh::MVH_ISA

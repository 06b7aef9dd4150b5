// One chunk of SRNL for one head and direction: what its tokens do to the memories, forward and
// backward. Equations are those of the paper; kernels/README.md derives the adjoint.
#pragma once

#include "simd.h"

namespace mvh::MVH_ISA {

constexpr int kLanes = 16;  // tokens whose scalar quantities are computed side by side

// Numbers of Definition 1, Appendix B.3 and C.1; ops/reference.py names them.
constexpr double kRateScale = 0.025;
constexpr double kRetentionLogit = 2.1972245773362196;  // log(0.9 / 0.1)
constexpr double kScalarLimit = 10.0;
constexpr double kEps = 1e-6;
constexpr double kKeyEps = 1e-6;
constexpr double kInjectionMargin = 1 - 1e-3;
constexpr double kSpectralMargin = 1 - 1e-6;

// Head-dimension traits: a row of D numbers is `parts` vectors of `width` lanes.
template <typename T, int D>
struct Dim {
  static constexpr int width = D < 16 ? D : 16;
  static constexpr int parts = D / width;
  using Row = Vec<T, width>;
};

// A D x D matrix kept as D vectors of D lanes: columns or rows, as its user has it.
template <typename T, int D>
struct Matrix {
  using Row = typename Dim<T, D>::Row;
  static constexpr int parts = Dim<T, D>::parts;
  Row v[D][parts];

  MVH_INLINE void set_identity() {
    constexpr int width = Dim<T, D>::width;
    for (int j = 0; j < D; ++j)
      for (int p = 0; p < parts; ++p)
        v[j][p] = generate<T, width>([&](int i) { return T(p * width + i == j); });
  }
  MVH_INLINE void load_from(const T* p) {
    for (int j = 0; j < D; ++j)
      for (int q = 0; q < parts; ++q)
        v[j][q] = load<T, Dim<T, D>::width>(p + j * D + q * Dim<T, D>::width);
  }
  MVH_INLINE void store_to(T* p) const {
    for (int j = 0; j < D; ++j)
      for (int q = 0; q < parts; ++q)
        store<T, Dim<T, D>::width>(p + j * D + q * Dim<T, D>::width, v[j][q]);
  }
  MVH_INLINE void scale(T s) {
    for (int j = 0; j < D; ++j)
      for (int q = 0; q < parts; ++q) v[j][q] *= s;
  }
};

template <typename T, int D>
MVH_INLINE void load_row(typename Dim<T, D>::Row* row, const T* p) {
  for (int q = 0; q < Dim<T, D>::parts; ++q)
    row[q] = load<T, Dim<T, D>::width>(p + q * Dim<T, D>::width);
}

template <typename T, int D>
MVH_INLINE void store_row(T* p, const typename Dim<T, D>::Row* row) {
  for (int q = 0; q < Dim<T, D>::parts; ++q)
    store<T, Dim<T, D>::width>(p + q * Dim<T, D>::width, row[q]);
}

// sum_j a[j] * m.v[j]: with columns in m the product m a, with rows in m the product m^T a.
template <typename T, int D>
MVH_INLINE void combine(typename Dim<T, D>::Row* out, const T* m, const T* a) {
  using Row = typename Dim<T, D>::Row;
  constexpr int width = Dim<T, D>::width, parts = Dim<T, D>::parts;
  for (int p = 0; p < parts; ++p) {
    Row acc[4] = {};
    for (int j = 0; j < D; ++j) acc[j & 3] += a[j] * load<T, width>(m + j * D + p * width);
    out[p] = (acc[0] + acc[1]) + (acc[2] + acc[3]);
  }
}

// c = b a for matrices stored as rows; equally, in transposed storage, c^T = a^T b^T. c may be a,
// but not b.
template <typename T, int D>
MVH_INLINE void multiply(T* c, const T* b, const T* a) {
  using Row = typename Dim<T, D>::Row;
  constexpr int width = Dim<T, D>::width, parts = Dim<T, D>::parts;
  for (int p = 0; p < parts; ++p) {
    Row rows[D];
    for (int j = 0; j < D; ++j) rows[j] = load<T, width>(a + j * D + p * width);
    for (int i = 0; i < D; ++i) {
      Row acc[2] = {};
      for (int j = 0; j < D; ++j) acc[j & 1] += b[i * D + j] * rows[j];
      store<T, width>(c + i * D + p * width, acc[0] + acc[1]);
    }
  }
}

template <typename T, int D>
MVH_INLINE void transpose(T* out, const T* in) {
  if constexpr (D % 16 == 0) {
    for (int bi = 0; bi < D; bi += 16)
      for (int bj = 0; bj < D; bj += 16) {
        Vec<T, 16> r[16];
        for (int i = 0; i < 16; ++i) r[i] = load<T, 16>(in + (bi + i) * D + bj);
        transpose16<T>(r);
        for (int i = 0; i < 16; ++i) store<T, 16>(out + (bj + i) * D + bi, r[i]);
      }
  } else {
    for (int i = 0; i < D; ++i)
      for (int j = 0; j < D; ++j) out[j * D + i] = in[i * D + j];
  }
}

// `count` rows of D numbers, `stride` apart, to D vectors over 16 tokens, and back.
template <typename T, int D>
MVH_INLINE void rows_to_lanes(Vec<T, kLanes>* lanes, const T* rows, int64_t stride, int count) {
  if constexpr (D % 16 == 0) {
    for (int b = 0; b < D; b += 16) {
      for (int t = 0; t < 16; ++t)
        lanes[b + t] = t < count ? load<T, 16>(rows + t * stride + b) : Vec<T, 16>{};
      transpose16<T>(lanes + b);
    }
  } else {
    for (int i = 0; i < D; ++i)
      lanes[i] =
          generate<T, kLanes>([&](int t) { return t < count ? rows[t * stride + i] : T(0); });
  }
}

template <typename T, int D>
MVH_INLINE void lanes_to_rows(T* rows, const Vec<T, kLanes>* lanes) {
  if constexpr (D % 16 == 0) {
    for (int b = 0; b < D; b += 16) {
      Vec<T, 16> r[16];
      for (int t = 0; t < 16; ++t) r[t] = lanes[b + t];
      transpose16<T>(r);
      for (int t = 0; t < 16; ++t) store<T, 16>(rows + t * D + b, r[t]);
    }
  } else {
    alignas(64) T column[kLanes];
    for (int i = 0; i < D; ++i) {
      store<T, kLanes>(column, lanes[i]);
      for (int t = 0; t < kLanes; ++t) rows[t * D + i] = column[t];
    }
  }
}

// The memories that generate a chunk's tokens: key and value stored so that out[i] of column j is
// at [j * D + i], rate and retention as rows.
template <typename T, int D>
struct Generators {
  T key[D * D], value[D * D], rate[D], retention[D];
};

// Equations 15, 19, 20, 53 for 16 tokens, lanes being tokens.
template <typename T, int D>
struct TokenBlock {
  using V = Vec<T, kLanes>;
  V k[D], delta[D];
  V inverse_norm;             // k = k_raw * inverse_norm
  V alpha, beta, log_alpha;   // retention, 1 - retention
  V step;                     // executed
  V raw, phi, u, r0;          // eta, (1 - exp(-u)) / u, u = eta / eta_inj, |delta| (with epsilon)
  V key_square, fires;        // fires: 1 where the spectral clamp holds, else 0
  V rate_slope, retention_slope;  // d eta / d s_eta and whether s_alpha is inside its clamp
};

template <typename T, int D>
MVH_INLINE void project(Vec<T, kLanes>* out, const T* m, const Vec<T, kLanes>* x) {
  constexpr int block = D < 8 ? D : 8;
  for (int i = 0; i < D; i += block) {
    Vec<T, kLanes> acc[block] = {};
    for (int j = 0; j < D; ++j)
      for (int a = 0; a < block; ++a) acc[a] += m[j * D + i + a] * x[j];
    for (int a = 0; a < block; ++a) out[i + a] = acc[a];
  }
}

// a . b for 16 tokens.
template <typename T, int D, typename A, typename B>
MVH_INLINE Vec<T, kLanes> dot(const A* a, const B* b) {
  Vec<T, kLanes> acc[4] = {};
  for (int j = 0; j < D; ++j) acc[j & 3] += a[j] * b[j];
  return (acc[0] + acc[1]) + (acc[2] + acc[3]);
}

template <typename T, int D>
MVH_INLINE void token_block(TokenBlock<T, D>& b, const Generators<T, D>& g, const T* x_rows,
                            int64_t stride, int count) {
  using V = Vec<T, kLanes>;
  V x[D];
  rows_to_lanes<T, D>(x, x_rows, stride, count);

  // Rate and retention first: their long way through exp and log goes on under the projections.
  const V limit = splat<T, kLanes>(T(kScalarLimit)), one = splat<T, kLanes>(T(1));
  const V rate = dot<T, D>(g.rate, x);
  const V s = vmax(vmin(rate, limit), -limit);
  const V e = exp_nonpositive<kLanes>(s < T(0) ? s : -s);
  const V inverse = T(1) / (T(1) + e);
  b.raw = T(kRateScale) * (vmax(s, V{}) + log1p_unit<kLanes>(e));
  b.rate_slope = T(kRateScale) * (s < T(0) ? e * inverse : inverse);
  b.rate_slope = (rate < -limit) | (rate > limit) ? V{} : b.rate_slope;

  const V retention = dot<T, D>(g.retention, x) + T(kRetentionLogit);
  const V a = vmax(vmin(retention, limit), -limit);
  const V f = exp_nonpositive<kLanes>(a < T(0) ? a : -a);
  const V big = T(1) / (T(1) + f), small = f * big;
  b.alpha = a < T(0) ? small : big;
  b.beta = a < T(0) ? big : small;
  b.log_alpha = vmin(a, V{}) - log1p_unit<kLanes>(f);
  b.retention_slope = (retention < -limit) | (retention > limit) ? V{} : one;

  V v[D];
  project<T, D>(b.k, g.key, x);
  project<T, D>(v, g.value, x);
  const V square = dot<T, D>(b.k, b.k);
  b.inverse_norm = T(1) / vsqrt<T, kLanes>(square + T(kKeyEps));
  b.key_square = square * (b.inverse_norm * b.inverse_norm);
  for (int i = 0; i < D; ++i) {
    b.k[i] *= b.inverse_norm;
    b.delta[i] = b.k[i] - v[i];
  }
  const V distance = dot<T, D>(b.delta, b.delta);

  b.r0 = vsqrt<T, kLanes>(distance + T(kEps * kEps));
  b.u = b.raw * (b.r0 + T(kEps)) / (T(kInjectionMargin) * b.beta);
  // (1 - exp(-u)) / u: a series where the difference would cancel.
  const V t = vmin(b.u, splat<T, kLanes>(T(0.5)));
  V series = 1 - t / T(sizeof(T) == 4 ? 10 : 16);
  for (int n = sizeof(T) == 4 ? 9 : 15; n > 1; --n) series = 1 - t / T(n) * series;
  const V direct = (T(1) - exp_nonpositive<kLanes>(-b.u)) / b.u;
  b.phi = b.u < T(0.5) ? series : direct;
  const V capped = b.raw * b.phi;

  const V bound = T(2 * kSpectralMargin) * b.alpha;
  const auto fires = capped * b.key_square > bound;
  V clamp = bound / b.key_square;
  clamp *= T(1) - std::numeric_limits<T>::epsilon() / 2;  // one ulp towards zero
  b.step = fires ? clamp : capped;
  b.fires = fires ? one : V{};

  // Tokens past the end of the chunk leave the memories alone.
  if (count < kLanes) {
    const auto inside =
        generate<T, kLanes>([](int t) { return T(t); }) < splat<T, kLanes>(T(count));
    for (V* v : {&b.step, &b.log_alpha, &b.rate_slope, &b.retention_slope}) *v = inside ? *v : V{};
    for (int i = 0; i < D; ++i) {
      b.k[i] = inside ? b.k[i] : V{};
      b.delta[i] = inside ? b.delta[i] : V{};
    }
  }
}

// The products a_n . b_n of every other of 16 rows, each in two lanes.
template <typename T, int D>
MVH_INLINE Vec<T, kLanes> every_other_dot(const T* a, const T* b) {
  constexpr int width = 16, parts = D / width;
  Vec<T, width> product[8];
  for (int n = 0; n < 8; ++n) {
    product[n] = Vec<T, width>{};
    for (int p = 0; p < parts; ++p)
      product[n] += load<T, width>(a + 2 * n * D + p * width) *
                    load<T, width>(b + 2 * n * D + p * width);
  }
  return sum_pairs<T>(product);
}

// a_t . b_t of 16 rows.
template <typename T, int D>
MVH_INLINE Vec<T, kLanes> row_dots(const T* a, const T* b) {
  if constexpr (D % 16 == 0)
    return alternate<T>(every_other_dot<T, D>(a, b), every_other_dot<T, D>(a + D, b + D));
  return generate<T, kLanes>([&](int t) {
    T dot = 0;
    for (int i = 0; i < D; ++i) dot += a[t * D + i] * b[t * D + i];
    return dot;
  });
}

// out[t] = out[t + 1] = a_t . b_{t+1} for even t, of 16 rows.
template <typename T, int D>
MVH_INLINE void pair_dots(T* out, const T* a, const T* b) {
  if constexpr (D % 16 == 0) {
    store<T, kLanes>(out, every_other_dot<T, D>(a, b + D));
  } else {
    for (int t = 0; t < kLanes; t += 2) {
      T dot = 0;
      for (int i = 0; i < D; ++i) dot += a[t * D + i] * b[(t + 1) * D + i];
      out[t] = out[t + 1] = dot;
    }
  }
}

// What a block's recurrences need of each token besides its rows, tokens past the end being zero.
template <typename T>
struct Factors {
  const T *log_alpha, *step, *pair;  // pair as pair_dots has it
};

// Running factors of a block in the order of the visit, forward or in reverse: G is kept divided by
// its decay gamma, which is folded back after the block, or earlier where gamma gets small. gamma
// is the exponential of a sum: a product of rounded alphas close to 1 would drift by as many ulp as
// there are tokens.
template <typename T>
struct Decay {
  alignas(64) T before[kLanes];  // gamma up to the token visited before
  alignas(64) T weight[kLanes];  // step / gamma up to this token
  alignas(64) T carry[kLanes];   // step times the product with the other token of its pair
  alignas(64) T fold[kLanes];    // multiply G by it after this token and restart; 0: go on
  T last;                        // multiply G by it after the block
};

template <typename T, bool reverse>
MVH_INLINE void decay_block(Decay<T>& d, const Factors<T>& f) {
  using V = Vec<T, kLanes>;
  constexpr T lowest = T(-40);  // 1 / gamma stays far from the largest float32
  const V step = load<T, kLanes>(f.step);
  const V given = load<T, kLanes>(f.log_alpha);
  const V log_alpha = reverse ? reversed<T>(given) : given;
  const V sum = prefix_sum<T>(log_alpha);
  store<T, kLanes>(d.carry, step * load<T, kLanes>(f.pair));
  store<T, kLanes>(d.fold, V{});
  if (sum[kLanes - 1] >= lowest) {
    const V after = exp_nonpositive<kLanes>(sum);
    const V before = exp_nonpositive<kLanes>(shift_up<T, 1>(sum));
    store<T, kLanes>(d.before, reverse ? reversed<T>(before) : before);
    store<T, kLanes>(d.weight, step / (reverse ? reversed<T>(after) : after));
    d.last = after[kLanes - 1];
    return;
  }
  T total = 0;
  for (int n = 0; n < kLanes; ++n) {
    const int t = reverse ? kLanes - 1 - n : n;
    d.before[t] = std::exp(total);
    total += f.log_alpha[t];
    d.weight[t] = f.step[t] * std::exp(-total);
    if ((n & 1) && (total < lowest / 2)) {
      d.fold[t] = std::exp(total);
      total = 0;
    }
  }
  d.last = std::exp(total);
}

// The tokens of a pair, the one visited first and the other.
struct Pair {
  int first, second;
};
template <bool reverse>
MVH_INLINE Pair pair(int n, int count) {
  return reverse ? Pair{count - 1 - n, count - 2 - n} : Pair{n, n + 1};
}

// G -= a_1 b_1^T + a_2 b_2^T for rows a and coefficients b, G by columns. The first product does
// not wait for the second one's row.
template <typename T, int D>
MVH_INLINE void subtract_pair(Matrix<T, D>& g, int p, const T* b1, typename Dim<T, D>::Row a1,
                              const T* b2, typename Dim<T, D>::Row a2) {
  b1 = reload(b1);
  b2 = reload(b2);
  for (int j = 0; j < D; ++j) g.v[j][p] -= b1[j] * a1;
  for (int j = 0; j < D; ++j) g.v[j][p] -= b2[j] * a2;
}

// (46) for a block of tokens (an even number), two at a time, G by columns:
//   u_t = G_{t-1} k_t + delta_t,  G_t = alpha_t G_{t-1} - step_t u_t k_t^T.
// In reverse and without delta it is the adjoint's own recurrence, u being w_t = D_t k_t.
// f.pair is of k with itself.
template <typename T, int D, bool reverse>
MVH_INLINE void gain_block(Matrix<T, D>& g, const T* k, const T* delta, const Factors<T>& f,
                           int count, T* u_rows) {
  using Row = typename Dim<T, D>::Row;
  constexpr int parts = Dim<T, D>::parts;
  Decay<T> decay;
  decay_block<T, reverse>(decay, f);
  for (int n = 0; n < count; n += 2) {
    const auto [t1, t2] = pair<reverse>(n, count);
    const T *k1 = k + t1 * D, *k2 = k + t2 * D;
    Row d1[parts] = {}, d2[parts] = {};
    if (delta) {
      load_row<T, D>(d1, delta + t1 * D);
      load_row<T, D>(d2, delta + t2 * D);
    }
    for (int p = 0; p < parts; ++p) {
      Row a[2] = {}, b[2] = {};
      for (int j = 0; j < D; ++j) {
        a[j & 1] += k1[j] * g.v[j][p];
        b[j & 1] += k2[j] * g.v[j][p];
      }
      const Row u1 = decay.before[t1] * (a[0] + a[1]) + d1[p];
      const Row u2 = decay.before[t2] * (b[0] + b[1]) + d2[p] - decay.carry[t1] * u1;
      if (u_rows) {
        constexpr int width = Dim<T, D>::width;
        store<T, width>(u_rows + t1 * D + p * width, u1);
        store<T, width>(u_rows + t2 * D + p * width, u2);
      }
      subtract_pair<T, D>(g, p, k1, decay.weight[t1] * u1, k2, decay.weight[t2] * u2);
    }
    if (decay.fold[t2] != T(0)) g.scale(decay.fold[t2]);
  }
  g.scale(decay.last);
}

// The same recurrence with known u, G by rows, for the products the other way round:
//   out_t = G_{t-1}^T in_t,  G_t = alpha_t G_{t-1} - step_t u_t k_t^T.
// f.pair is of u and in; with `add` the products are added to what out has.
template <typename T, int D, bool reverse, bool add>
MVH_INLINE void transposed_block(Matrix<T, D>& g, const T* k, const T* u, const T* in,
                                 const Factors<T>& f, int count, T* out) {
  using Row = typename Dim<T, D>::Row;
  constexpr int parts = Dim<T, D>::parts, width = Dim<T, D>::width;
  Decay<T> decay;
  decay_block<T, reverse>(decay, f);
  for (int n = 0; n < count; n += 2) {
    const auto [t1, t2] = pair<reverse>(n, count);
    const T *u1 = u + t1 * D, *u2 = u + t2 * D, *in1 = in + t1 * D, *in2 = in + t2 * D;
    for (int p = 0; p < parts; ++p) {
      const Row k1 = load<T, width>(k + t1 * D + p * width);
      const Row k2 = load<T, width>(k + t2 * D + p * width);
      Row a[2] = {}, b[2] = {};
      for (int i = 0; i < D; ++i) {
        a[i & 1] += in1[i] * g.v[i][p];
        b[i & 1] += in2[i] * g.v[i][p];
      }
      T *out1 = out + t1 * D + p * width, *out2 = out + t2 * D + p * width;
      Row first = decay.before[t1] * (a[0] + a[1]);
      Row second = decay.before[t2] * (b[0] + b[1]) - decay.carry[t1] * k1;
      if (add) {
        first += load<T, width>(out1);
        second += load<T, width>(out2);
      }
      store<T, width>(out1, first);
      store<T, width>(out2, second);
      subtract_pair<T, D>(g, p, u1, decay.weight[t1] * k1, u2, decay.weight[t2] * k2);
    }
    if (decay.fold[t2] != T(0)) g.scale(decay.fold[t2]);
  }
  g.scale(decay.last);
}

// Gradients of what 16 tokens are made of, lanes being tokens.
template <typename T, int D>
struct TokenGradient {
  using V = Vec<T, kLanes>;
  V key[D], value[D], rate, retention;  // of the four products with the memories
};

// The adjoint of token_block. u, w, v are rows of u_t = G_{t-1} k_t + delta_t, w_t = D_t k_t and
// G_{t-1}^T w_t + D_t^T u_t; carry is c = <G_t, D_t> before the block, and after it on return. D
// grows with t, so from front to back c sums from small to large and keeps its digits.
template <typename T, int D>
MVH_INLINE void token_gradient(TokenGradient<T, D>& out, const TokenBlock<T, D>& b,
                               const T* u_rows, const T* w_rows, const T* v_rows, T& carry) {
  using V = Vec<T, kLanes>;
  V u[D], w[D], v[D];
  rows_to_lanes<T, D>(u, u_rows, D, kLanes);
  rows_to_lanes<T, D>(w, w_rows, D, kLanes);
  rows_to_lanes<T, D>(v, v_rows, D, kLanes);
  V uw = {}, injected = {};
  for (int i = 0; i < D; ++i) {
    uw += u[i] * w[i];
    injected += w[i] * b.delta[i];
  }
  // alpha_t <G_{t-1}, D_t> = c_{t-1} + step_t (u_t - delta_t) w_t, c_t = c_{t-1} - step_t delta_t w_t.
  injected *= b.step;
  alignas(64) T lost[kLanes];
  store<T, kLanes>(lost, injected);
  V kept = generate<T, kLanes>([&](int t) {
    const T before = carry;
    carry -= lost[t];
    return before;
  });
  kept += b.step * uw - injected;

  const V step = -uw, capped = (T(1) - b.fires) * step, clamped = b.fires * step * b.step;
  // phi'(u), by its series where phi(u) - exp(-u) would cancel.
  const V decay = exp_nonpositive<kLanes>(-b.u);
  const V t = vmin(b.u, splat<T, kLanes>(T(0.5)));
  constexpr int terms = sizeof(T) == 4 ? 9 : 15;
  V series = {}, factor = splat<T, kLanes>(T(-0.5));
  for (int n = 1; n <= terms; ++n) {
    series += factor;
    factor *= -t * (T(n + 1) / (T(n) * T(n + 2)));
  }
  const V direct = (decay - b.phi) / b.u;
  const V slope = b.u < T(0.5) ? series : direct;
  const V grad_u = capped * b.raw * slope * b.u;  // times u: what both its factors need
  out.rate = capped * decay * b.rate_slope;
  out.retention = (b.beta * (kept + clamped) + grad_u * b.alpha) * b.retention_slope;

  const V along_delta = grad_u / (b.r0 * (b.r0 + T(kEps)));
  const V along_key = T(-2) * clamped / (b.fires > T(0) ? b.key_square : T(1) + V{});
  V projection = {};
  for (int i = 0; i < D; ++i) {
    const V grad_delta = along_delta * b.delta[i] - b.step * w[i];
    out.value[i] = -grad_delta;
    out.key[i] = grad_delta - b.step * v[i] + along_key * b.k[i];
    projection += out.key[i] * b.k[i];
  }
  for (int i = 0; i < D; ++i)
    out.key[i] = b.inverse_norm * (out.key[i] - projection * b.k[i]);
}

}  // namespace mvh::MVH_ISA

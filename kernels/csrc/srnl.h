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

  MVH_INLINE void set_zero() {
    for (int j = 0; j < D; ++j)
      for (int p = 0; p < parts; ++p) v[j][p] = Row{};
  }
  MVH_INLINE void set_identity() {
    set_zero();
    for (int j = 0; j < D; ++j) v[j][j / Dim<T, D>::width][j % Dim<T, D>::width] = T(1);
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

// c = b a for matrices stored as rows; equally, in transposed storage, c^T = a^T b^T. a must not
// alias c.
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

// 16 rows of D numbers to D vectors over 16 tokens, and back.
template <typename T, int D>
MVH_INLINE void rows_to_lanes(Vec<T, kLanes>* lanes, const T* rows) {
  if constexpr (D % 16 == 0) {
    for (int b = 0; b < D; b += 16) {
      for (int t = 0; t < 16; ++t) lanes[b + t] = load<T, 16>(rows + t * D + b);
      transpose16<T>(lanes + b);
    }
  } else {
    for (int i = 0; i < D; ++i)
      for (int t = 0; t < kLanes; ++t) lanes[i][t] = rows[t * D + i];
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
    for (int i = 0; i < D; ++i)
      for (int t = 0; t < kLanes; ++t) rows[t * D + i] = lanes[i][t];
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
  constexpr int block = 4;
  for (int i = 0; i < D; i += block) {
    Vec<T, kLanes> acc[block] = {};
    for (int j = 0; j < D; ++j)
      for (int a = 0; a < block; ++a) acc[a] += m[j * D + i + a] * x[j];
    for (int a = 0; a < block; ++a) out[i + a] = acc[a];
  }
}

template <typename T, int D>
MVH_INLINE void token_block(TokenBlock<T, D>& b, const Generators<T, D>& g, const T* x_rows,
                            int count) {
  using V = Vec<T, kLanes>;
  V x[D];
  rows_to_lanes<T, D>(x, x_rows);
  project<T, D>(b.k, g.key, x);
  V v[D];
  project<T, D>(v, g.value, x);
  V rate = {}, retention = {}, square = {};
  for (int j = 0; j < D; ++j) {
    rate += g.rate[j] * x[j];
    retention += g.retention[j] * x[j];
    square += b.k[j] * b.k[j];
  }
  b.inverse_norm = T(1) / vsqrt<T, kLanes>(square + T(kKeyEps));
  b.key_square = square * (b.inverse_norm * b.inverse_norm);
  V distance = {};
  for (int i = 0; i < D; ++i) {
    b.k[i] *= b.inverse_norm;
    b.delta[i] = b.k[i] - v[i];
    distance += b.delta[i] * b.delta[i];
  }

  const V limit = splat<T, kLanes>(T(kScalarLimit)), one = splat<T, kLanes>(T(1));
  const V s = vmax(vmin(rate, limit), -limit);
  const V e = exp_nonpositive<kLanes>(s < T(0) ? s : -s);
  const V inverse = T(1) / (T(1) + e);
  b.raw = T(kRateScale) * (vmax(s, V{}) + log1p_unit<kLanes>(e));
  b.rate_slope = T(kRateScale) * (s < T(0) ? e * inverse : inverse);
  b.rate_slope = (rate < -limit) | (rate > limit) ? V{} : b.rate_slope;

  retention += T(kRetentionLogit);
  const V a = vmax(vmin(retention, limit), -limit);
  const V f = exp_nonpositive<kLanes>(a < T(0) ? a : -a);
  const V big = T(1) / (T(1) + f), small = f * big;
  b.alpha = a < T(0) ? small : big;
  b.beta = a < T(0) ? big : small;
  b.log_alpha = vmin(a, V{}) - log1p_unit<kLanes>(f);
  b.retention_slope = (retention < -limit) | (retention > limit) ? V{} : one;

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
  if (count < kLanes)
    for (int t = count; t < kLanes; ++t) {
      b.step[t] = T(0);
      b.log_alpha[t] = T(0);
      b.rate_slope[t] = b.retention_slope[t] = T(0);
      for (int i = 0; i < D; ++i) b.k[i][t] = b.delta[i][t] = T(0);
    }
}

// Tokens are visited forward or backward: `at` maps the visit to the token.
template <bool reverse>
MVH_INLINE int at(int visit, int count) {
  return reverse ? count - 1 - visit : visit;
}

// Running factors of a block, by visit: G is kept divided by its decay gamma, which is folded back
// after the block, or earlier where gamma gets small. gamma is the exponential of a sum: a product
// of rounded alphas close to 1 would drift by as many ulp as there are tokens.
template <typename T>
struct Decay {
  alignas(64) T before[kLanes];  // gamma up to the previous token
  alignas(64) T weight[kLanes];  // step / gamma up to this token
  T fold[kLanes];                // after this (odd) visit multiply G by fold and restart; 0: go on
};

template <typename T, bool reverse>
MVH_INLINE void decay_block(Decay<T>& d, const T* log_alpha, const T* step, int count) {
  constexpr T lowest = T(-12);
  alignas(64) T sum[kLanes + 1] = {}, steps[kLanes] = {};
  bool folds = false;
  for (int n = 0; n < count; ++n) {
    const int t = at<reverse>(n, count);
    sum[n + 1] = sum[n] + log_alpha[t];
    steps[n] = step[t];
    d.fold[n] = 0;
    if ((n & 1) && sum[n + 1] < lowest) folds = true;
  }
  if (!folds) {
    const Vec<T, kLanes> after = exp_nonpositive<kLanes>(load<T, kLanes>(sum + 1));
    store<T, kLanes>(d.before, exp_nonpositive<kLanes>(load<T, kLanes>(sum)));
    store<T, kLanes>(d.weight, load<T, kLanes>(steps) / after);
    d.fold[count - 1] = after[count - 1];
    return;
  }
  T total = 0;
  for (int n = 0; n < count; ++n) {
    d.before[n] = std::exp(total);
    total += log_alpha[at<reverse>(n, count)];
    d.weight[n] = steps[n] * std::exp(-total);
    if ((n & 1) && (total < lowest || n == count - 1)) {
      d.fold[n] = std::exp(total);
      total = 0;
    }
  }
}

// (46) for a block of tokens (an even number), two at a time, G by columns:
//   u_t = G_{t-1} k_t + delta_t,  G_t = alpha_t G_{t-1} - step_t u_t k_t^T.
// In reverse and without delta it is the adjoint's own recurrence, u being w_t = D_t k_t.
template <typename T, int D, bool reverse>
MVH_INLINE void gain_block(Matrix<T, D>& g, const T* k, const T* delta, const T* log_alpha,
                           const T* step, int count, T* u_rows) {
  using Row = typename Dim<T, D>::Row;
  constexpr int parts = Dim<T, D>::parts;
  Decay<T> decay;
  decay_block<T, reverse>(decay, log_alpha, step, count);
  for (int n = 0; n < count; n += 2) {
    const int t1 = at<reverse>(n, count), t2 = at<reverse>(n + 1, count);
    const T *k1 = k + t1 * D, *k2 = k + t2 * D;
    T dot = 0;
    for (int i = 0; i < D; ++i) dot += k1[i] * k2[i];
    Row u1[parts], u2[parts];
    for (int p = 0; p < parts; ++p) {
      Row a[2] = {}, b[2] = {};
      for (int j = 0; j < D; ++j) {
        a[j & 1] += k1[j] * g.v[j][p];
        b[j & 1] += k2[j] * g.v[j][p];
      }
      u1[p] = a[0] + a[1];
      u2[p] = b[0] + b[1];
    }
    Row d1[parts] = {}, d2[parts] = {};
    if (delta) {
      load_row<T, D>(d1, delta + t1 * D);
      load_row<T, D>(d2, delta + t2 * D);
    }
    const T before1 = decay.before[n], before2 = decay.before[n + 1];
    const T carry = step[t1] * dot, w1 = decay.weight[n], w2 = decay.weight[n + 1];
    for (int p = 0; p < parts; ++p) {
      u1[p] = before1 * u1[p] + d1[p];
      u2[p] = before2 * u2[p] + d2[p] - carry * u1[p];
    }
    if (u_rows) {
      store_row<T, D>(u_rows + t1 * D, u1);
      store_row<T, D>(u_rows + t2 * D, u2);
    }
    for (int p = 0; p < parts; ++p) {
      const Row s1 = w1 * u1[p], s2 = w2 * u2[p];
      for (int j = 0; j < D; ++j) g.v[j][p] -= k1[j] * s1 + k2[j] * s2;
    }
    if (decay.fold[n + 1] != T(0)) g.scale(decay.fold[n + 1]);
  }
}

// The same recurrence with known u, G by rows, for the products the other way round:
//   out_t += G_{t-1}^T in_t,  G_t = alpha_t G_{t-1} - step_t u_t k_t^T.
template <typename T, int D, bool reverse>
MVH_INLINE void transposed_block(Matrix<T, D>& g, const T* k, const T* u, const T* in,
                                 const T* log_alpha, const T* step, int count, T* out) {
  using Row = typename Dim<T, D>::Row;
  constexpr int parts = Dim<T, D>::parts;
  Decay<T> decay;
  decay_block<T, reverse>(decay, log_alpha, step, count);
  for (int n = 0; n < count; n += 2) {
    const int t1 = at<reverse>(n, count), t2 = at<reverse>(n + 1, count);
    const T *u1 = u + t1 * D, *u2 = u + t2 * D, *in1 = in + t1 * D, *in2 = in + t2 * D;
    Row k1[parts], k2[parts];
    load_row<T, D>(k1, k + t1 * D);
    load_row<T, D>(k2, k + t2 * D);
    T dot = 0;
    for (int i = 0; i < D; ++i) dot += u1[i] * in2[i];
    const T carry = step[t1] * dot, w1 = decay.weight[n], w2 = decay.weight[n + 1];
    for (int p = 0; p < parts; ++p) {
      Row a[2] = {}, b[2] = {};
      for (int i = 0; i < D; ++i) {
        a[i & 1] += in1[i] * g.v[i][p];
        b[i & 1] += in2[i] * g.v[i][p];
      }
      constexpr int width = Dim<T, D>::width;
      T *out1 = out + t1 * D + p * width, *out2 = out + t2 * D + p * width;
      store<T, width>(out1, load<T, width>(out1) + decay.before[n] * (a[0] + a[1]));
      store<T, width>(out2, load<T, width>(out2) + decay.before[n + 1] * (b[0] + b[1]) -
                                carry * k1[p]);
      const Row s1 = w1 * k1[p], s2 = w2 * k2[p];
      for (int i = 0; i < D; ++i) g.v[i][p] -= u1[i] * s1 + u2[i] * s2;
    }
    if (decay.fold[n + 1] != T(0)) g.scale(decay.fold[n + 1]);
  }
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
  rows_to_lanes<T, D>(u, u_rows);
  rows_to_lanes<T, D>(w, w_rows);
  rows_to_lanes<T, D>(v, v_rows);
  V uw = {}, injected = {};
  for (int i = 0; i < D; ++i) {
    uw += u[i] * w[i];
    injected += w[i] * b.delta[i];
  }
  // alpha_t <G_{t-1}, D_t> = c_{t-1} + step_t (u_t - delta_t) w_t, c_t = c_{t-1} - step_t delta_t w_t.
  V kept = {};
  injected *= b.step;
  for (int t = 0; t < kLanes; ++t) {
    kept[t] = carry;
    carry -= injected[t];
  }
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

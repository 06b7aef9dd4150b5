// Vectors of N lanes by compiler extension: they compile to whatever the target has (AVX-512, AVX2,
// NEON), several registers to a vector where one is too small.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#define MVH_INLINE inline __attribute__((always_inline))

namespace mvh::MVH_ISA {

template <typename T, int N>
struct VecOf {
  typedef T type __attribute__((vector_size(sizeof(T) * N)));
};
template <typename T, int N>
using Vec = typename VecOf<T, N>::type;

template <typename T, int N>
MVH_INLINE Vec<T, N> load(const T* p) {
  Vec<T, N> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <typename T, int N>
MVH_INLINE void store(T* p, const Vec<T, N>& v) {
  std::memcpy(p, &v, sizeof(v));
}

// The same pointer, but the compiler cannot know: it loads anew what it would otherwise keep, and
// spill, between two uses far apart.
template <typename T>
MVH_INLINE const T* reload(const T* p) {
  asm("" : "+r"(p));
  return p;
}

template <typename T, int N>
MVH_INLINE Vec<T, N> splat(T x) {
  return x - Vec<T, N>{};
}

// Lanes are written through arrays, never by subscript: GCC 12 makes of loops that do so aligned
// stores to addresses that are not.
template <typename T, int N, typename F>
MVH_INLINE Vec<T, N> generate(F&& f) {
  alignas(64) T lanes[N];
  for (int i = 0; i < N; ++i) lanes[i] = f(i);
  return load<T, N>(lanes);
}

template <typename T, int N, typename F>
MVH_INLINE Vec<T, N> map(Vec<T, N> x, F&& f) {
  alignas(64) T lanes[N];
  store<T, N>(lanes, x);
  for (int i = 0; i < N; ++i) lanes[i] = f(lanes[i]);
  return load<T, N>(lanes);
}

// The smaller and the larger; a NaN in a stays one.
template <typename V>
MVH_INLINE V vmin(V a, V b) {
  return b < a ? b : a;
}

template <typename V>
MVH_INLINE V vmax(V a, V b) {
  return b > a ? b : a;
}

// exp(x) for x <= 0 in float32, within 2 ulp; 0 below -87. The power of two is assembled in the
// exponent bits, the rest is a polynomial on |r| <= ln(2) / 2.
template <int N>
MVH_INLINE Vec<float, N> exp_nonpositive(Vec<float, N> x) {
  using V = Vec<float, N>;
  using I = Vec<int32_t, N>;
  const V low = splat<float, N>(-87.f);
  const V clamped = vmax(x, low);
  const V magic = splat<float, N>(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const V shifted = clamped * 1.44269504f + magic;
  const V n = shifted - magic;
  V r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  V p = splat<float, N>(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  I bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits << 23) + (127 << 23);
  V scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  return x < low ? V{} : p * scale;
}

template <int N>
MVH_INLINE Vec<double, N> exp_nonpositive(Vec<double, N> x) {
  return map<double, N>(x, [](double a) { return std::exp(a); });
}

// log(1 + e) for 0 < e <= 1, by 2 atanh(e / (2 + e)): small e keep their relative accuracy.
template <int N>
MVH_INLINE Vec<float, N> log1p_unit(Vec<float, N> e) {
  const Vec<float, N> t = e / (2.f + e), s = t * t;
  Vec<float, N> p = splat<float, N>(1.f / 15);
  p = p * s + 1.f / 13;
  p = p * s + 1.f / 11;
  p = p * s + 1.f / 9;
  p = p * s + 1.f / 7;
  p = p * s + 1.f / 5;
  p = p * s + 1.f / 3;
  return 2.f * t * (p * s + 1.f);
}

template <int N>
MVH_INLINE Vec<double, N> log1p_unit(Vec<double, N> e) {
  return map<double, N>(e, [](double a) { return std::log1p(a); });
}

template <typename T, int N>
MVH_INLINE Vec<T, N> vsqrt(Vec<T, N> x) {
  return map<T, N>(x, [](T a) { return std::sqrt(a); });
}

#if defined(__clang__) || __GNUC__ >= 12
#define MVH_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MVH_SHUFFLE(a, b, ...) \
  __builtin_shuffle(a, b, Vec<std::conditional_t<sizeof(a[0]) == 4, int32_t, int64_t>, 16>{__VA_ARGS__})
#endif

// Lanes moved up by N, zeros moved in.
template <typename T, int N>
MVH_INLINE Vec<T, 16> shift_up(Vec<T, 16> a) {
  const Vec<T, 16> z{};
  if constexpr (N == 1) return MVH_SHUFFLE(z, a, 0, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30);
  if constexpr (N == 2) return MVH_SHUFFLE(z, a, 0, 1, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29);
  if constexpr (N == 4) return MVH_SHUFFLE(z, a, 0, 1, 2, 3, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27);
  if constexpr (N == 8) return MVH_SHUFFLE(z, a, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
}

template <typename T>
MVH_INLINE Vec<T, 16> prefix_sum(Vec<T, 16> a) {
  a += shift_up<T, 1>(a);
  a += shift_up<T, 2>(a);
  a += shift_up<T, 4>(a);
  return a + shift_up<T, 8>(a);
}

template <typename T>
MVH_INLINE Vec<T, 16> reversed(Vec<T, 16> a) {
  return MVH_SHUFFLE(a, a, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}

// The sums of 8 vectors' lanes, each twice: out[2 n] = out[2 n + 1] = sum of v[n].
template <typename T>
MVH_INLINE Vec<T, 16> sum_pairs(const Vec<T, 16>* v) {
  using V = Vec<T, 16>;
  V half[4], quarter[2];
  for (int n = 0; n < 4; ++n)
    half[n] = MVH_SHUFFLE(v[n], v[n + 4], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
              MVH_SHUFFLE(v[n], v[n + 4], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  for (int n = 0; n < 2; ++n)
    quarter[n] =
        MVH_SHUFFLE(half[n], half[n + 2], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
        MVH_SHUFFLE(half[n], half[n + 2], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  const V eighth =
      MVH_SHUFFLE(quarter[0], quarter[1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
      MVH_SHUFFLE(quarter[0], quarter[1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  return eighth + MVH_SHUFFLE(eighth, eighth, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
}

// Even lanes of a, odd lanes of b.
template <typename T>
MVH_INLINE Vec<T, 16> alternate(Vec<T, 16> a, Vec<T, 16> b) {
  return MVH_SHUFFLE(a, b, 0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31);
}

// In-register transpose of 16 x 16, by exchanging blocks of 1, 2, 4 and 8.
template <typename T>
MVH_INLINE void transpose16(Vec<T, 16>* r) {
#define MVH_STAGE(step, LO, HI)                                   \
  for (int i = 0; i < 16; ++i)                                    \
    if (!(i & step)) {                                            \
      const Vec<T, 16> a = r[i], b = r[i + step];                 \
      r[i] = MVH_SHUFFLE(a, b, LO);                               \
      r[i + step] = MVH_SHUFFLE(a, b, HI);                        \
    }
#define MVH_LO1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define MVH_HI1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define MVH_LO2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define MVH_HI2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define MVH_LO4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define MVH_HI4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define MVH_LO8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define MVH_HI8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
  MVH_STAGE(1, MVH_LO1, MVH_HI1)
  MVH_STAGE(2, MVH_LO2, MVH_HI2)
  MVH_STAGE(4, MVH_LO4, MVH_HI4)
  MVH_STAGE(8, MVH_LO8, MVH_HI8)
#undef MVH_STAGE
}

}  // namespace mvh::MVH_ISA

// The op on CPU tensors: allocates, picks the kernels of this processor, sums over images.
// ops/scan.py has checked the arguments; ops/library.py calls this.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <Python.h>
#include <torch/library.h>

#include <tuple>

#include "kernel.h"

namespace {

using at::Tensor;
using mvh::Gradients;
using mvh::Inputs;
using mvh::Outputs;

mvh::Type type_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kDouble: return mvh::Type::float64;
    case at::kBFloat16: return mvh::Type::bfloat16;
    case at::kHalf: return mvh::Type::float16;
    default: return mvh::Type::float32;
  }
}

mvh::Pixels pixels(const Tensor& t) {
  return {t.data_ptr(), type_of(t), t.element_size(), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

mvh::Parallel parallel() {
  return {at::get_num_threads(), [](int64_t count, const std::function<void(int64_t, int64_t)>& body) {
            at::parallel_for(0, count, 1, body);
          }};
}

// torch's own reading of the processor, which ATEN_CPU_CAPABILITY overrides.
enum class Isa { generic, avx2, avx512 };
Isa isa() {
#if defined(__x86_64__)
  static const Isa chosen = [] {
    const std::string capability = at::get_cpu_capability();
    return capability == "AVX512" ? Isa::avx512 : capability == "AVX2" ? Isa::avx2 : Isa::generic;
  }();
  return chosen;
#else
  return Isa::generic;
#endif
}

void run(const Inputs<double>& in, const Outputs<double>& out) {
  mvh::generic::forward(in, out, parallel());
}
void run(const Inputs<double>& in, const Gradients<double>& out) {
  mvh::generic::backward(in, out, parallel());
}
void run(const Inputs<float>& in, const Outputs<float>& out) {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return mvh::avx512::forward(in, out, parallel());
  if (isa() == Isa::avx2) return mvh::avx2::forward(in, out, parallel());
#endif
  mvh::generic::forward(in, out, parallel());
}
void run(const Inputs<float>& in, const Gradients<float>& out) {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return mvh::avx512::backward(in, out, parallel());
  if (isa() == Isa::avx2) return mvh::avx2::backward(in, out, parallel());
#endif
  mvh::generic::backward(in, out, parallel());
}

// The arguments of one call, held for as long as the kernels read them.
template <typename T>
struct Call {
  Tensor z, q, content, key, value, rate, retention, skip, scale, pass;

  Call(const Tensor& z, const Tensor& q, const Tensor& content, const Tensor& key,
       const Tensor& value, const Tensor& rate, const Tensor& retention, const Tensor& skip,
       const Tensor& scale)
      : z(z), q(q), content(content.contiguous()), key(key.contiguous()), value(value.contiguous()),
        rate(rate.contiguous()), retention(retention.contiguous()), skip(skip),
        scale(scale.contiguous().view_as(rate)), pass((this->scale * skip).sum(0).contiguous()) {}

  Inputs<T> inputs(at::IntArrayRef directions, int64_t row_chunk, int64_t col_chunk) const {
    const mvh::Shape shape{z.size(0),       z.size(1),
                           z.size(2),       content.size(1),
                           content.size(2), static_cast<int64_t>(directions.size()),
                           directions.data(), row_chunk, col_chunk};
    return {shape, pixels(z), pixels(q), data(content), data(key), data(value), data(rate),
            data(retention), data(scale), data(pass)};
  }

  static T* data(const Tensor& t) { return t.data_ptr<T>(); }
};

Tensor like(const Tensor& z) {
  return at::empty(z.sizes(), z.options().memory_format(at::MemoryFormat::Contiguous));
}

template <typename T>
std::tuple<Tensor, Tensor> forward_as(const Call<T>& call, at::IntArrayRef directions,
                                      int64_t row_chunk, int64_t col_chunk, bool save) {
  const Inputs<T> in = call.inputs(directions, row_chunk, col_chunk);
  const mvh::Shape& s = in.shape;
  Tensor y = like(call.z);
  const int64_t chunks = save ? s.first_chunk(s.routes) : 0;
  Tensor gains = at::empty({s.batch, s.heads, chunks, s.dims, s.dims}, call.content.options());
  if (y.numel()) run(in, Outputs<T>{pixels(y), save ? call.data(gains) : nullptr});
  return {y, gains};
}

std::tuple<Tensor, Tensor> forward(const Tensor& z, const Tensor& q, const Tensor& content,
                                   const Tensor& key, const Tensor& value, const Tensor& rate,
                                   const Tensor& retention, const Tensor& skip, const Tensor& scale,
                                   at::IntArrayRef directions, int64_t row_chunk, int64_t col_chunk,
                                   bool save) {
  if (z.scalar_type() == at::kDouble)
    return forward_as(Call<double>(z, q, content, key, value, rate, retention, skip, scale),
                      directions, row_chunk, col_chunk, save);
  return forward_as(Call<float>(z, q, content, key, value, rate, retention, skip, scale),
                    directions, row_chunk, col_chunk, save);
}

using Nine = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <typename T>
Nine backward_as(const Call<T>& call, const Tensor& dy, const Tensor& gains,
                 at::IntArrayRef directions, int64_t row_chunk, int64_t col_chunk) {
  const Inputs<T> in = call.inputs(directions, row_chunk, col_chunk);
  const auto per_image = [&](const Tensor& t) {
    std::vector<int64_t> size = t.sizes().vec();
    size.insert(size.begin(), in.shape.batch);
    return at::zeros(size, t.options());
  };
  Tensor dz = like(call.z), dq = like(call.z);
  Tensor content = per_image(call.content), key = per_image(call.key);
  Tensor value = per_image(call.value), rate = per_image(call.rate);
  Tensor retention = per_image(call.retention), scale = per_image(call.scale);
  if (dz.numel())
    run(in, Gradients<T>{pixels(dy), call.data(gains), pixels(dz), pixels(dq), call.data(content),
                         call.data(key), call.data(value), call.data(rate), call.data(retention),
                         call.data(scale)});
  // What goes through the skip connection: y += scale * skip * z.
  const Tensor through =
      (dy.to(call.rate.scalar_type()) * call.z).sum({0, 1, 2}).view(call.pass.sizes());
  const Tensor scale_grad = scale.sum(0) + call.skip * through;
  Tensor skip_grad = call.scale * through;
  if (call.skip.dim() == 2) skip_grad = skip_grad.sum(0);
  return {dz,          dq,          content.sum(0),   key.sum(0), value.sum(0),
          rate.sum(0), retention.sum(0), skip_grad, scale_grad.flatten(1)};
}

Nine backward(const Tensor& dy, const Tensor& z, const Tensor& q, const Tensor& content,
              const Tensor& key, const Tensor& value, const Tensor& rate, const Tensor& retention,
              const Tensor& skip, const Tensor& scale, const Tensor& gains,
              at::IntArrayRef directions, int64_t row_chunk, int64_t col_chunk) {
  if (z.scalar_type() == at::kDouble)
    return backward_as(Call<double>(z, q, content, key, value, rate, retention, skip, scale), dy,
                       gains, directions, row_chunk, col_chunk);
  return backward_as(Call<float>(z, q, content, key, value, rate, retention, skip, scale), dy,
                     gains, directions, row_chunk, col_chunk);
}

}  // namespace

TORCH_LIBRARY(mmvisionhope_cpu, m) {
  m.def("forward", forward);
  m.def("backward", backward);
}

// `import mmvisionhope._C` is what loads the library.
extern "C" PyObject* PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr,
                               nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}

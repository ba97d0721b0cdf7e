// The device "away" of the tests, which imitates a GPU. Its memory is the host's and its operators
// are the CPU's, but an operator refuses tensors of two devices.
#include <torch/extension.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <cstring>
#include <string>

namespace {

constexpr auto AWAY = c10::DeviceType::PrivateUse1;
const c10::Device HERE(AWAY, 0);
int64_t fetched = 0;  // how often the host read values of the device, for which it waits on a GPU
thread_local bool inside = false;  // an operator runs; its own copies do not count as reads

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {data, data, &c10::free_cpu, HERE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
Memory memory;
REGISTER_ALLOCATOR(AWAY, &memory);

// One device with one stream, so there is nothing to wait for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return AWAY; }
  c10::Device exchangeDevice(c10::Device) const override { return HERE; }
  c10::Device getDevice() const override { return HERE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, HERE);
  }
  c10::Stream exchangeStream(c10::Stream) const override {
    return c10::Stream(c10::Stream::DEFAULT, HERE);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {  // of the CPU's numbers
  Generator() {
    device_ = HERE;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

void hand_over(at::CPUGeneratorImpl& from, at::CPUGeneratorImpl& to) {
  to.set_engine(from.engine());
  to.set_next_float_normal_sample(from.next_float_normal_sample());
  to.set_next_double_normal_sample(from.next_double_normal_sample());
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const auto one = at::make_generator<Generator>();
    return one;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr grown = memory.allocate(bytes);
    std::memcpy(grown.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr(std::move(grown));
    storage.set_nbytes(bytes);
  }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// Returns the same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  auto storage = tensor.storage();
  const auto release = [](void* owned) { delete static_cast<c10::Storage*>(owned); };
  return at::for_blob(tensor.numel() ? tensor.data_ptr() : nullptr, tensor.sizes())
      .strides(tensor.strides())
      .options(tensor.options().device(c10::kCPU).requires_grad(false))
      .context(new c10::Storage(storage), release)
      .make_tensor();
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (to.device().is_cpu() && !inside) ++fetched;
  if (to.numel()) on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& tensor) {
  ++fetched;
  return at::_local_scalar_dense(on_cpu(tensor));
}

const at::Tensor& resized(const at::Tensor& self, c10::IntArrayRef size,
                          std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t bytes = (self.numel() + self.storage_offset()) * self.itemsize();
  if (bytes > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

// Runs every other operator on the CPU, but refuses what a GPU refuses: tensors of two devices,
// except single numbers and indices.
void elsewhere(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string name = op.schema().name();
  const bool indexed = name == "aten::index" || name == "aten::index_put_" ||
                       name == "aten::index_put" || name == "aten::_index_put_impl_";
  const auto& arguments = torch::jit::last(*stack, op.schema().arguments().size());
  std::optional<c10::Device> seen;
  const auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.device().is_cpu() && tensor.dim() == 0) || indexed) return;
    TORCH_CHECK(!seen || *seen == tensor.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *seen, " and ", tensor.device(), "! (", name, ")");
    seen = tensor.device();
  };
  for (const auto& argument : arguments) {
    if (argument.isTensor()) look(argument.toTensor());
    if (argument.isTensorList())
      for (const at::Tensor& tensor : argument.toTensorVector()) look(tensor);
    if (argument.isList() && !argument.isTensorList())
      for (const c10::IValue& each : argument.toListRef())
        if (each.isTensor()) look(each.toTensor());
  }
  // A generator of the CPU draws in the place of ours, from our state and back to it.
  Generator* ours = nullptr;
  at::Generator drawing;
  const size_t count = arguments.size();
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& argument = torch::jit::peek(*stack, i, count);
    if (!argument.isGenerator() || argument.toGenerator().device() != HERE) continue;
    ours = static_cast<Generator*>(argument.toGenerator().unsafeGetGeneratorImpl());
    drawing = at::make_generator<at::CPUGeneratorImpl>();
    hand_over(*ours, *static_cast<at::CPUGeneratorImpl*>(drawing.unsafeGetGeneratorImpl()));
    argument = drawing;
  }
  const bool before = inside;
  inside = true;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    inside = before;
    throw;
  }
  inside = before;
  if (ours) hand_over(*static_cast<at::CPUGeneratorImpl*>(drawing.unsafeGetGeneratorImpl()), *ours);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resized);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&elsewhere>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("begin", [] { at::RegisterPrivateUse1HooksInterface(new Hooks); });
  m.def("fetched", [] { return fetched; });
}

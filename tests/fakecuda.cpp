// A device type "cuda" for a torch that finds no GPU. It has no memory and no kernels: under
// FakeTensorMode tensors have shapes, dtypes and a device, and that is all this needs. Three things
// are registered: a device guard (autograd's engine asks it for devices and streams), hooks (torch
// asks them whether CUDA is there), and the choice of attention's kernel, which follows the rules
// of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.

#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr int DEVICES = 8;
static thread_local c10::DeviceIndex current = 0;

static c10::DeviceIndex exchange(c10::DeviceIndex index) {
  const c10::DeviceIndex old = current;
  if (index >= 0) {
    current = index;
  }
  return old;
}

struct Guard final : public c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(CUDA, exchange(device.index()));
  }
  c10::Device getDevice() const override {
    return c10::Device(CUDA, current);
  }
  void setDevice(c10::Device device) const override {
    exchange(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchange(device.index());
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    const auto index = device.index() < 0 ? current : device.index();
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(CUDA, index));
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
};

namespace at {

struct FakeHooks : public CUDAHooksInterface {
  explicit FakeHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return DEVICES; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { exchange(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
};
// Preferred, because a CUDA build of torch has registered hooks of its own
C10_REGISTER_CLASS_WITH_PRIORITY(
    CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, FakeHooks);

} // namespace at

enum Kernel : int64_t { PLAIN = 0, FLASH = 1, MEMORY_EFFICIENT = 2 };

static int64_t attention_kernel(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& /*v*/,
    const std::optional<at::Tensor>& mask,
    double /*dropout*/,
    bool /*causal*/,
    std::optional<double> /*scale*/,
    bool grouped) {
  const auto dtype = q.scalar_type();
  const bool half = dtype == at::kBFloat16 || dtype == at::kHalf;
  if (half && !mask && q.size(-1) <= 256) {
    return FLASH;
  }
  if (dtype == at::kDouble || (grouped && q.size(1) != k.size(1))) {
    return PLAIN;
  }
  return MEMORY_EFFICIENT;
}

static Guard guard;

extern "C" void install() {
  c10::impl::device_guard_impl_registry[static_cast<int>(CUDA)].store(&guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_kernel);
}

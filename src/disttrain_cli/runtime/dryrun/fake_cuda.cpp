// CUDA devices without a GPU: what PyTorch's CPU build must be told before torch is imported, so that fake tensors on
// "cuda" run forward and backward. Streams and events do nothing.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using namespace c10;
constexpr DeviceIndex kDevices = 8;
thread_local DeviceIndex current = 0;

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    setDevice(device);
    return old;
  }
  void setDevice(Device device) const override { if (device.index() >= 0) current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { if (device.index() >= 0) current = device.index(); }
  Stream getStream(Device device) const noexcept override {
    return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, device.index() < 0 ? current : device.index()));
  }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

struct Register {
  Register() { impl::device_guard_impl_registry[(size_t)DeviceType::CUDA].store(new Guard()); }
} registered;
}  // namespace

namespace at::cuda::detail {
struct CUDAHooks : public at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto old = current;
    current = device;
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  bool isPinnedPtr(const void*) const override { return false; }
  int getNumGPUs() const override { return kDevices; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at::cuda::detail

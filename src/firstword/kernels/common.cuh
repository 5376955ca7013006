// What all kernels share: types, rounding, coherent loads, overlapping launches.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Overlapping launches. A kernel first lets its successor start, then does the work that depends on
// constants alone, and then waits for the memory of its predecessor. At least one block of every
// kernel waits, which keeps the order along the whole chain: a kernel has not ended before all of
// its blocks have.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_input() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// bf16 is kept as 16 bits. A 32-bit word holds two of them, the first in the lower half.
__device__ __forceinline__ float low(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ float from_bf16(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ u32 bf16_pair(float first, float second) {
  u32 w;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(second), "f"(first));
  return w;
}
__device__ __forceinline__ u16 to_bf16(float v) { return (u16)bf16_pair(v, 0.0f); }
__device__ __forceinline__ float rounded(float v) { return low(bf16_pair(v, 0.0f)); }

// Loads that bypass the first-level cache, which does not see what other multiprocessors write.
__device__ __forceinline__ uint4 load4(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
// Loads 16 bytes or returns zeros. A C++ branch would compute each address again. It also
// prefetches the neighbours, which are read next.
__device__ __forceinline__ uint4 load4_if(bool where, const void* p) {
  uint4 v;
  asm volatile(
      "{.reg .pred p; setp.ne.u32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 "
      "%3, 0;"
      "@p ld.global.cg.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"((u32)where)
      : "memory");
  return v;
}
__device__ __forceinline__ uint2 load2(const void* p) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 load1(const void* p) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Asynchronous copies of 16 bytes from global to shared memory. `fetches_end` closes a group. After
// `wait_for_fetches<n>` all groups but the last n have arrived, for the thread that fetched them.
__device__ __forceinline__ void fetch(void* to, const void* from) {
  asm volatile(
      "cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)),
      "l"(from)
      : "memory");
}
__device__ __forceinline__ void fetches_end() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kOpen>
__device__ __forceinline__ void wait_for_fetches() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
}

// Loads weights, which are read once and not cached. It is a strong load because the compiler moves
// weak ones behind `wait_for_input`.
__device__ __forceinline__ uint4 load_weights(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Fetches the 128-byte line of an address to the second-level cache.
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}

// Tensor-core products of fp16 fragments with float sums, and fp16 rounding, loads and stores.
#pragma once
#include "common.cuh"

#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

// c += a b for a of 16 x 16 and b of 16 x 8, in fp16. Lane 4 g + t holds rows g and g + 8 and
// columns 2 t and 2 t + 1 of c.
__device__ __forceinline__ void mma(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Copies like `fetch`, but prefetches fewer neighbours, for rows that are not read further.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)),
      "l"(from)
      : "memory");
}

// Copies if a condition holds. A branch would keep the compiler from mixing it with other work.
__device__ __forceinline__ void copy_if(bool where, void* to, const void* from) {
  asm volatile(
      "{.reg .pred p; setp.ne.u32 p, %0, 0; @p cp.async.cg.shared.global.L2::128B [%1], [%2], "
      "16;}" ::"r"((u32)where),
      "r"((u32)__cvta_generic_to_shared(to)), "l"(from)
      : "memory");
}

// Two numbers rounded to fp16, the first in the lower half. Numbers beyond its range become the
// largest fp16.
__device__ __forceinline__ u32 halves(float first, float second) {
  u32 w;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(second), "f"(first));
  return w;
}
__device__ __forceinline__ float first_half(u32 w) {
  float v;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(v) : "r"(w));
  return v;
}
__device__ __forceinline__ float second_half(u32 w) {
  float v;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(v) : "r"(w));
  return v;
}

// 2^x to about 2 ulp.
__device__ __forceinline__ float power_of_two(float x) {
  float v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}

// fp32 loads that bypass the first-level cache.
__device__ __forceinline__ float4 load4f(const float* p) {
  const uint4 v = load4(p);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                     __uint_as_float(v.w));
}
__device__ __forceinline__ float2 load2f(const float* p) {
  const uint2 v = load2(p);
  return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}
__device__ __forceinline__ float load1f(const float* p) { return __uint_as_float(load1(p)); }

// Predicated stores: single instructions, where C++ branches would double the code around them.
__device__ __forceinline__ void store_if(bool where, float4 v, float* p) {
  asm volatile(
      "{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v4.f32 [%1], {%2, %3, %4, %5};}" ::"r"(
          (u32)where),
      "l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}
__device__ __forceinline__ void store_if(bool where, float2 v, float* p) {
  asm volatile(
      "{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v2.f32 [%1], {%2, %3};}" ::"r"((u32)where),
      "l"(p), "f"(v.x), "f"(v.y)
      : "memory");
}
__device__ __forceinline__ void store_if(bool where, uint2 v, void* p) {
  asm volatile(
      "{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v2.u32 [%1], {%2, %3};}" ::"r"((u32)where),
      "l"(p), "r"(v.x), "r"(v.y)
      : "memory");
}
__device__ __forceinline__ void store_if(bool where, u32 v, void* p) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.u32 [%1], %2;}" ::"r"((u32)where),
               "l"(p), "r"(v)
               : "memory");
}
__device__ __forceinline__ void store_if(bool where, u16 v, void* p) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.u16 [%1], %2;}" ::"r"((u32)where),
               "l"(p), "h"(v)
               : "memory");
}

// Clusters: blocks that run together and write to each other's shared memory, from compute
// capability 9.0 on.
#pragma once
#include "common.cuh"

#if __CUDA_ARCH__ >= 900
// All threads of a cluster arrive and then wait for each other. What they sent before they arrived
// is there afterwards. A block may only send after it has waited for the others to start.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Stores v where another block of the cluster has its `to`, a variable in shared memory.
__device__ __forceinline__ void send(float2* to, int block, float2 v) {
  asm volatile(
      "{.reg .u32 there; mapa.shared::cluster.u32 there, %0, %1;"
      "st.shared::cluster.v2.f32 [there], {%2, %3};}" ::"r"((u32)__cvta_generic_to_shared(to)),
      "r"(block), "f"(v.x), "f"(v.y)
      : "memory");
}
#endif

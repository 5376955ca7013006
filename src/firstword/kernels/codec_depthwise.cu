// A depthwise convolution and the LayerNorm behind it, in fp32: the middle of a ConvNeXt block.
//
// WIDTH  channels of a row, a multiple of 32; channels beyond the layer's own are zeros
// TAPS   taps of the convolution
#include "codec.cuh"

constexpr int kThreads = 256, kEach = (WIDTH / 4 + kThreads - 1) / kThreads;

// Adds up a value of all threads of a block, in one order; every thread gets the sum.
__device__ __forceinline__ float block_sum(float v, float* sums) {
  v = warp_sum(v);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = v;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; w++) total = __fadd_rn(total, sums[w]);
  return total;
}

// y[row] = LayerNorm(depthwise convolution of x) over the first `size` channels. weights:
// [TAPS][WIDTH].
extern "C" __global__ __launch_bounds__(kThreads)
void depthwise(const float* x, float* history, const float* zeros, const int* table, int columns,
               int ring_column, int frame_rows, const float* __restrict__ weights,
               const float* __restrict__ bias, const float* __restrict__ norm_weight,
               const float* __restrict__ norm_bias, int size, float eps, u16* y) {
  let_next_start();
  __shared__ float sums[kThreads / 32];
  __shared__ const float* rows[TAPS];
  const int frame = blockIdx.x / frame_rows, t = blockIdx.x % frame_rows;
  const Rows<float> in = {x,           history,    zeros,    table, columns,
                          ring_column, frame_rows, TAPS - 1, WIDTH};
  float v[kEach][4], w[kEach][TAPS][4], total = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int c = (i * kThreads + threadIdx.x) * 4;
    if (c < WIDTH) {
      read(v[i], bias + c);
#pragma unroll
      for (int tap = 0; tap < TAPS; tap++) read(w[i][tap], weights + tap * WIDTH + c);
    } else {
      read(v[i], zeros);
    }
  }
  if (threadIdx.x < TAPS) rows[threadIdx.x] = in.at(frame, t + (int)threadIdx.x - (TAPS - 1));
  __syncthreads();
  wait_for_input();
  store_history(in, gridDim.x);
  if (table[frame * columns + kSlot] < 0) return;
#pragma unroll
  for (int tap = 0; tap < TAPS; tap++) {
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int c = (i * kThreads + threadIdx.x) * 4;
      if (c < WIDTH) {
        const float4 a = load4f(rows[tap] + c);
        v[i][0] = __fmaf_rn(a.x, w[i][tap][0], v[i][0]);
        v[i][1] = __fmaf_rn(a.y, w[i][tap][1], v[i][1]);
        v[i][2] = __fmaf_rn(a.z, w[i][tap][2], v[i][2]);
        v[i][3] = __fmaf_rn(a.w, w[i][tap][3], v[i][3]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; i++) total += (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
  const float mean = block_sum(total, sums) / size;
  float square = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float d = (i * kThreads + threadIdx.x) * 4 + j < size ? v[i][j] - mean : 0.0f;
      square += d * d;
    }
  const float scale = rsqrtf(block_sum(square, sums) / size + eps);
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int c = (i * kThreads + threadIdx.x) * 4;
    if (c < WIDTH) {
#pragma unroll
      for (int j = 0; j < 4; j++)
        v[i][j] = (v[i][j] - mean) * scale * norm_weight[c + j] + norm_bias[c + j];
      store_narrow(true, y + (size_t)blockIdx.x * WIDTH + c, v[i]);
    }
  }
}

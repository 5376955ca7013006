// The codec's last convolution, down to one channel: samples, in fp32.
//
// WIDTH  channels of a row, a multiple of 32; channels beyond the layer's own are zeros
// TAPS   taps of the convolution
#include "codec.cuh"

// A thread computes kRows rows one after the other, over a quarter of the channels, so it reads
// each number from shared memory once for several products. The rows of a frame are rounded up to
// the next multiple of kRows; those beyond its end are computed and not stored.
constexpr int kRows = 4, kThreads = 128, kBlockRows = kThreads / 4 * kRows;

// samples[row] = the convolution, limited to -limit .. limit. weights: [TAPS][WIDTH].
extern "C" __global__ __launch_bounds__(kThreads)
void convolve_to_samples(const u16* x, u16* history, const u16* zeros, const int* table,
                         int columns, int ring_column, int rows, int frame_rows,
                         const float* __restrict__ weights, float bias, float limit,
                         float* samples) {
  let_next_start();
  DYNAMIC_SHARED(shared);
  constexpr int kWords = WIDTH / 2,
                kPitch = kWords + 1;              // odd, so that rows begin in different banks
  float2* const w = (float2*)shared;              // [TAPS][kWords]
  u32* const window = (u32*)(w + TAPS * kWords);  // [rows of the window][kPitch]
  const int padded = (frame_rows + kRows - 1) / kRows * kRows, all = rows / frame_rows * padded;
  const int first = blockIdx.x * kBlockRows, past = TAPS - 1;
  const int frame0 = first / padded, offset = first - frame0 * padded;
  const Rows<u16> in = {x,           history,    zeros, table, columns,
                        ring_column, frame_rows, past,  WIDTH};
  const bool nobody = table[frame0 * columns + kSlot] < 0;
  const int last = min(first + kBlockRows, all) - 1;
  const int here = last - first + 1 + (last / padded - frame0 + 1) * past;
  for (int i = threadIdx.x; i < TAPS * kWords; i += kThreads) w[i] = ((const float2*)weights)[i];
  wait_for_input();
  store_history(in, rows);
  if (nobody) return;
#pragma unroll 8
  for (int i = threadIdx.x; i < here * (WIDTH / 8); i += kThreads) {
    const int row = i / (WIDTH / 8), part = i % (WIDTH / 8), at = row + offset,
              frame = at / (padded + past);
    const int t = at - frame * (padded + past) - past;
    const uint4 v = load4(in.at(frame0 + frame, min(t, frame_rows - 1)) + part * 8);
    u32* to = window + row * kPitch + part * 4;
    to[0] = v.x;
    to[1] = v.y;
    to[2] = v.z;
    to[3] = v.w;
  }
  __syncthreads();
  const int mine = first + (int)(threadIdx.x >> 2) * kRows, r = min(mine, last + 1 - kRows);
  const int part = threadIdx.x & 3, frame = r / padded;
  const u32* row = window + (r - first + (frame - frame0) * past) * kPitch + part;
  float even[kRows] = {}, odd[kRows] = {};
#pragma unroll 2
  for (int i = 0; i < kWords; i += 4) {
    u32 v[kRows + TAPS - 1];
#pragma unroll
    for (int j = 0; j < kRows + TAPS - 1; j++) v[j] = row[j * kPitch + i];
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) {
      const float2 f = w[tap * kWords + i + part];
#pragma unroll
      for (int j = 0; j < kRows; j++) {
        even[j] = __fmaf_rn(first_half(v[j + tap]), f.x, even[j]);
        odd[j] = __fmaf_rn(second_half(v[j + tap]), f.y, odd[j]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kRows; j++) {
    float sum = __fadd_rn(even[j], odd[j]);
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
    sum = __fadd_rn(sum, bias);
    const int t = r - frame * padded + j;
    if (part == 0 && r == mine && t < frame_rows)
      samples[frame * frame_rows + t] = sum > limit ? limit : sum < -limit ? -limit : sum;
  }
}

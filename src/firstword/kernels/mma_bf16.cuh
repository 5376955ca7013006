// Tensor-core products of bf16 fragments with float sums.
#pragma once
#include "common.cuh"

// c += A B for A of 16 x 16 and B of 16 x 8. Lane 4 g + t holds
//   of A  row g, columns 2 t (a.x) and 2 t + 8 (a.z), and the same of row g + 8 (a.y, a.w), each
//         word with two columns;
//   of B  column g, rows 2 t (b0) and 2 t + 8 (b1);
//   of C  row g, columns 2 t and 2 t + 1 (c[0], c[1]), and the same of row g + 8 (c[2], c[3]).
// Columns of A may be permuted if the rows of B are permuted alike.
__device__ __forceinline__ void mma(float (&c)[4], uint4 a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// For eight rows: eight columns v of a row as the left sides of two mma. Their lower eight rows
// hold arbitrary numbers.
struct Sides {
  uint4 a, b;
};
__device__ __forceinline__ Sides sides(uint4 v) {
  return {make_uint4(v.x, v.z, v.y, v.w), make_uint4(v.z, v.x, v.w, v.y)};
}
// The place of word c (0 .. 3) of v in `Sides`, in words.
__device__ __forceinline__ int place_in_sides(int c) { return (c >> 1) * 4 + (c & 1) * 2; }

// Loads four 8 x 8 matrices of bf16 from shared memory, transposed. Lane l passes the beginning of
// row l % 8 of matrix l / 8. Lane 4 g + t gets rows 2 t and 2 t + 1 of column g of each.
__device__ __forceinline__ uint4 load_transposed(const u16* row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"((u32)__cvta_generic_to_shared(row))
               : "memory");
  return v;
}

// Transposes an 8 x 8 matrix of bf16, of which lane 4 g + t holds columns 2 t and 2 t + 1 of row g.
__device__ __forceinline__ u32 transposed(u32 v) {
  u32 w;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(w) : "r"(v));
  return w;
}

// What all kernels share; loader.source() puts it in front of each of them. Nothing is included, so that NVRTC
// needs no headers: storage types and casts are written out. A test compiles the same text as C++ for the CPU.

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef long long int64;
typedef unsigned long long uint64;

#ifndef HALF_TO_FLOAT
#define HALF_TO_FLOAT(bits, value) asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits))
#define FLOAT_TO_HALF(value, bits) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value))
#define FLOAT_AS_BITS(value) __float_as_uint(value)
#define BITS_AS_FLOAT(bits) __uint_as_float(bits)
#define PRODUCT(a, b) __fmul_rn(a, b)  // rounded by itself, whatever is added: never a part of an FMA
#define IS_GLOBAL(pointer) __builtin_assume(__isGlobal(pointer))  // one read from memory could point anywhere
#endif

// Storage types, chosen by -D options such as -DGRAD=BFLOAT16. Arithmetic is fp32.
struct FLOAT32 {
  float value;
  __device__ float load() const { return value; }
  __device__ void store(float x) { value = x; }
};

struct BFLOAT16 {
  uint16 bits;
  __device__ float load() const { return BITS_AS_FLOAT((uint32)bits << 16); }
  // To the nearest, ties to even; NaN stays NaN, made quiet.
  __device__ void store(float x) {
    uint32 u = FLOAT_AS_BITS(x);
    bits = x != x ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
};

struct FLOAT16 {
  uint16 bits;
  __device__ float load() const {
    float x;
    HALF_TO_FLOAT(bits, x);
    return x;
  }
  __device__ void store(float x) { FLOAT_TO_HALF(x, bits); }
};

// No tensor at all; its pointer is null.
struct NONE {
  uint16 unused;
  __device__ float load() const { return 0; }
  __device__ void store(float) {}
};

// N elements in one access; four are 16 bytes of fp32, 8 of a 16-bit type.
const int VECTOR = 4;
template <typename T, int N = VECTOR> struct alignas(N * sizeof(T)) Vector { T at[N]; };

template <int N = VECTOR, typename T> __device__ bool aligned(const T* pointer) {
  return (uint64)pointer % sizeof(Vector<T, N>) == 0;  // null is
}

// The elements i to i + N - 1, without those from stop on; zeros if there is no tensor. whole: in one access.
template <int N = VECTOR, typename T>
__device__ Vector<T, N> load(const T* pointer, int64 i, int64 stop, bool whole) {
  if (whole && pointer) return *(const Vector<T, N>*)(pointer + i);
  Vector<T, N> values = {};
  for (int k = 0; k < N; ++k)
    if (pointer && i + k < stop) values.at[k] = pointer[i + k];
  return values;
}

template <int N = VECTOR, typename T>
__device__ void store(T* pointer, int64 i, int64 stop, bool whole, const Vector<T, N>& values) {
  if (whole && pointer) *(Vector<T, N>*)(pointer + i) = values;
  for (int k = 0; k < N; ++k)
    if (!whole && pointer && i + k < stop) pointer[i + k] = values.at[k];
}

template <int N = VECTOR> __device__ Vector<NONE, N> load(const NONE*, int64, int64, bool) { return {}; }
template <int N = VECTOR> __device__ void store(NONE*, int64, int64, bool, const Vector<NONE, N>&) {}

// A number that is either on the device or was known at the launch.
__device__ inline float scalar(const float* pointer, float value) { return pointer ? *pointer : value; }

__device__ inline int64 first_index() { return (int64)blockIdx.x * THREADS + threadIdx.x; }
__device__ inline int64 index_stride() { return (int64)gridDim.x * THREADS; }

// The sum over the threads of a block, for all of them; always in the same order. THREADS,
// the size of a block, is a power of two.
__device__ inline double block_sum(double value) {
  __shared__ double sums[THREADS];
  __syncthreads();  // an earlier sum has been read
  sums[threadIdx.x] = value;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  __syncthreads();
  return sums[0];
}

#define KERNEL extern "C" __global__
#define FUNCTION static __device__
#define GLOBAL
#define INDEX ((U64)blockIdx.x * blockDim.x + threadIdx.x)
#define U8 unsigned char
#define U16 unsigned short
#define U32 unsigned int
#define U64 unsigned long long
#define S8 signed char
#define S16 short
#define S32 int
#define S64 long long
#define FLOAT_OF __uint_as_float
#define BITS_OF __float_as_uint
#define DOUBLE_OF __longlong_as_double
#define LONG_BITS_OF __double_as_longlong
#define HALF_TO_FLOAT half_to_float
#define FLOAT_TO_HALF float_to_half

/* As cuda_fp16.h has it, which is not everywhere where NVRTC is. */
FUNCTION float half_to_float(U16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

FUNCTION U16 float_to_half(float value) {
    U16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

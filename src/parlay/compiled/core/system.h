/* What the thread pool (pool.c) needs from the operating system: to sleep on a word of memory, and to learn how long
 * threads waited for cores.
 *
 * Linux has both: futexes, and schedstat. Elsewhere one lock and one condition of POSIX threads serve all words, and nobody
 * tells how long threads waited. With PARLAY_POSIX that form is used on Linux too, so that it can be tested.
 */
#ifndef PARLAY_SYSTEM_H
#define PARLAY_SYSTEM_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

#if defined(__linux__) && !defined(PARLAY_POSIX)
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Sleeps while the word equals `seen`, for at most `nanoseconds`;
 * 0: without a limit. It may return early for no reason. */
static void sleep_on(uint32_t *word, uint32_t seen, int64_t nanoseconds)
{
    struct timespec most = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nanoseconds ? &most : 0, 0, 0);
}

/* Wakes all threads that sleep on a word. The caller has changed it before. */
static void wake(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}

static void forget_sleepers(void) {}

/* The system's number of the calling thread. */
static int64_t thread_name(void)
{
    return syscall(SYS_gettid);
}

/* How many nanoseconds a thread has waited for a core since it began. 0: the system does not tell. */
static int64_t waited_for_core(int64_t thread)
{
    char path[64], text[128];
    snprintf(path, sizeof path, "/proc/self/task/%d/schedstat", (int)thread);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    text[size > 0 ? size : 0] = 0;
    long long ran, waited;
    return sscanf(text, "%lld %lld", &ran, &waited) == 2 ? waited : 0;
}

#else

static pthread_mutex_t sleepers_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sleepers_bell = PTHREAD_COND_INITIALIZER;

static void sleep_on(uint32_t *word, uint32_t seen, int64_t nanoseconds)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    int64_t end = until.tv_nsec + nanoseconds;
    until.tv_sec += end / 1000000000, until.tv_nsec = end % 1000000000;
    pthread_mutex_lock(&sleepers_lock);
    if (__atomic_load_n(word, __ATOMIC_SEQ_CST) == seen) {
        if (nanoseconds)
            pthread_cond_timedwait(&sleepers_bell, &sleepers_lock, &until);
        else
            pthread_cond_wait(&sleepers_bell, &sleepers_lock);
    }
    pthread_mutex_unlock(&sleepers_lock);
}

static void wake(uint32_t *word)
{
    (void)word;
    pthread_mutex_lock(&sleepers_lock); /* with the lock, no thread is between its look at the word and its sleep */
    pthread_cond_broadcast(&sleepers_bell);
    pthread_mutex_unlock(&sleepers_lock);
}

/* In the child of a fork: none of the sleepers is there, and the lock may be held by a thread that is not. */
static void forget_sleepers(void)
{
    pthread_mutex_init(&sleepers_lock, 0);
    pthread_cond_init(&sleepers_bell, 0);
}

static int64_t thread_name(void)
{
    return 0;
}

static int64_t waited_for_core(int64_t thread)
{
    (void)thread;
    return 0;
}

#endif

#endif

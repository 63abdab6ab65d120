from django.db import migrations, models
from django.utils import timezone


class Migration(migrations.Migration):
    dependencies = [("kjo_django", "0008_schedules")]

    operations = [
        migrations.CreateModel(
            name="LimitControl",
            fields=[
                (
                    "name",
                    models.CharField(
                        max_length=255, primary_key=True, serialize=False, verbose_name="name"
                    ),
                ),
                (
                    "rate",
                    models.CharField(
                        blank=True,
                        default="",
                        help_text="How many jobs may start per unit of time, for example 5/s or 100/m.",
                        max_length=40,
                        verbose_name="rate",
                    ),
                ),
                (
                    "burst",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="How many jobs may start at once after a time without any. Empty: 1.",
                        null=True,
                        verbose_name="burst",
                    ),
                ),
                (
                    "concurrency",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="How many jobs may run at once, in all workers together.",
                        null=True,
                        verbose_name="concurrency",
                    ),
                ),
                (
                    "changed_by",
                    models.CharField(
                        blank=True, default="", max_length=150, verbose_name="changed by"
                    ),
                ),
                ("updated_at", models.DateTimeField(auto_now=True, verbose_name="updated at")),
            ],
            options={
                "verbose_name": "limit",
                "verbose_name_plural": "limits",
                "db_table": "kjo_limit_control",
                "ordering": ("name",),
                "default_permissions": ("view", "add", "change", "delete"),
            },
        ),
        migrations.CreateModel(
            name="HeldJob",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("job_id", models.UUIDField(unique=True, verbose_name="job")),
                ("generation", models.PositiveIntegerField(default=1, verbose_name="generation")),
                ("limit", models.CharField(max_length=255, verbose_name="limit")),
                ("queue", models.CharField(max_length=100, verbose_name="queue")),
                (
                    "rank",
                    models.SmallIntegerField(
                        default=0, help_text="The negative priority.", verbose_name="rank"
                    ),
                ),
                ("is_released", models.BooleanField(default=False, verbose_name="released")),
                (
                    "waiting_since",
                    models.DateTimeField(default=timezone.now, verbose_name="waiting since"),
                ),
            ],
            options={
                "verbose_name": "held job",
                "verbose_name_plural": "held jobs",
                "db_table": "kjo_held_job",
                "ordering": ("rank", "id"),
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(fields=["limit", "is_released", "rank", "id"], name="kjo_held_idx")
                ],
            },
        ),
    ]

import kjo_django.models
from django.db import migrations, models


class Migration(migrations.Migration):
    """Adds the priority of jobs, and the rank by which the database transport claims messages.

    A worker of the release before writes neither: its jobs have no priority, its messages rank 0.
    """

    dependencies = [
        ("kjo_django", "0006_workflows"),
    ]

    operations = [
        migrations.AddField(
            model_name="job",
            name="priority",
            field=models.SmallIntegerField(
                blank=True,
                help_text="From -100 to 100, the highest first; empty: 0.",
                null=True,
                verbose_name="priority",
            ),
        ),
        migrations.AddIndex(
            model_name="job",
            index=kjo_django.models.PartialIndex(
                condition=models.Q(
                    ("priority__isnull", False), ("state__in", ("pending", "failing"))
                ),
                led_by=('state',), fields=["queue", "-priority", "available_at", "id"],
                name="kjo_job_priority_due_idx",
            ),
        ),
        migrations.AddField(
            model_name="transportmessage",
            name="rank",
            field=models.SmallIntegerField(
                db_default=0,
                default=0,
                help_text="The negative priority: records of a lower rank are claimed first.",
            ),
        ),
        migrations.AddIndex(
            model_name="transportmessage",
            index=models.Index(
                fields=["topic", "consumer_group", "rank", "id"], name="kjo_message_rank_idx"
            ),
        ),
        migrations.RemoveIndex(
            model_name="transportmessage",
            name="kjo_message_next_idx",
        ),
    ]
